"""A model of each family on real engines, with tools, by every API."""

import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from conserve.launch import Launch, health
from tests.acceptance.clients.clients import INSTALLED
from tests.checkout import ROOT
from tests.engines.applications import START_S, URL
from tests.engines.models.families import FAMILIES, Family

NAME = "of-a-family"
PARAMETERS = {
    "type": "object",
    # One value, so that a model of random weights comes to an end of it.
    "properties": {"place": {"type": "string", "enum": ["here"]}},
    "required": ["place"],
    "additionalProperties": False,
}
FUNCTION = {"name": "look_up", "description": "Looks something up.", "parameters": PARAMETERS}
CHAT_TOOL = {"type": "function", "function": FUNCTION}
ASKED = [{"role": "user", "content": "Where is it?"}]
CALLED = [
    *ASKED,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "look_up", "arguments": '{"place": "here"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "There."},
]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_served_with_tools(machine_alone: None, tmp_path: Path, name: str) -> None:
    """None was, but the embedded model: vLLM takes no parser by itself."""
    assert not health(URL)
    family = FAMILIES[name]
    environment: dict[str, str] = {}
    if family.torchvision:
        torchvision = INSTALLED / "torchvision"
        if not (torchvision / ".installed").exists():
            pytest.skip("vLLM imports torchvision for this model: `make test-models` fetches it")
        path = [str(torchvision), str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(path)
    arguments = [
        *family.make(tmp_path / "model"),
        f"model={tmp_path / 'model'}",
        f"served_model_name={NAME}",
        # One engine, for a quick start.
        *("placement=collocated", "decoders=1", "lmcache.size_gb=0.5"),
        "engine.max_model_len=2048",
        # Random weights would have white space for ever, which JSON allows.
        'engine.structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": true}',
    ]
    log = tmp_path / "serve.log"
    with Launch(arguments, log, environment) as application:
        application.wait_until_serving(URL, 0, 1, timeout_s=START_S)
        said = log.read_text()
        assert f"tool calls: {family.tool} (by " in said
        assert f"reasoning: {family.reasoning or 'none'}" in said
        _tools_are_taken_by_every_api()
        _a_call_is_read(family, tmp_path / "model")


def _post(path: str, body: dict[str, Any]) -> Any:
    reply = httpx.post(URL + path, json={"model": NAME, "temperature": 0, **body}, timeout=120)
    assert reply.status_code == 200, reply.text
    return reply


def _tools_are_taken_by_every_api() -> None:
    for messages in (ASKED, CALLED):
        for stream in (False, True):
            said = {"messages": messages, "tools": [CHAT_TOOL], "max_tokens": 12, "stream": stream}
            reply = _post("/v1/chat/completions", said)
            if stream:
                assert reply.text.rstrip().endswith("data: [DONE]")
            else:
                assert reply.json()["choices"][0]["finish_reason"] in ("length", "stop")
    tool = {"name": "look_up", "input_schema": PARAMETERS}
    said = _post("/v1/messages", {"messages": ASKED, "tools": [tool], "max_tokens": 12}).json()
    assert said["usage"]["output_tokens"] > 0
    tool = {"type": "function", **FUNCTION}
    _post("/v1/responses", {"input": "Where is it?", "tools": [tool], "max_output_tokens": 12})


def _a_call_is_read(family: Family, model: Path) -> None:
    """Where vLLM can have a model call a tool, what it writes is read by the parser.

    Not every grammar of vLLM's brings a model of random weights to an end: of what is cut there,
    nothing is said.
    """
    if not family.forced:
        return
    from transformers import PreTrainedTokenizerFast

    tokens = PreTrainedTokenizerFast.from_pretrained(model)
    blank = [number for number in range(len(tokens)) if not tokens.decode([number]).strip()]
    said = {
        "messages": ASKED,
        "tools": [CHAT_TOOL],
        "tool_choice": "required",
        "max_tokens": 100,
        # It would put them wherever a grammar lets it, for ever.
        "logit_bias": {str(number): -100 for number in blank},
        # One that reasons does so for ever, by random weights.
        "chat_template_kwargs": {"enable_thinking": False},
    }
    choice = _post("/v1/chat/completions", said).json()["choices"][0]
    if choice["finish_reason"] == "length":
        return
    called = choice["message"]["tool_calls"][0]["function"]
    assert called["name"] == "look_up"
    # Not every grammar of vLLM's holds a model to what is required.
    assert json.loads(called["arguments"]) in ({"place": "here"}, {})
