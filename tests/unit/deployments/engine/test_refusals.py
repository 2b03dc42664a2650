"""What vLLM's own server says of requests that it refuses, as a client is told it.

The server is vLLM's, on the embedded model's template and tokenizer, up to the call that would hand
a request to the engine's core.
"""

import functools
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from vllm.config import VllmConfig
from vllm.v1.engine.input_processor import InputProcessor

from conserve import wire
from conserve.apis import CHAT, COMPLETIONS, COUNT_TOKENS, MESSAGES, RESPONSES
from conserve.errors import from_engine
from deployments.engine.http_server import explain_refusals
from deployments.engine.tokenizing import keep_text, keep_tokens
from deployments.engine.turns import EngineTurns, skip_media_cache
from deployments.upstream import prompt_lengths
from tests.unit.deployments.asgi import ask
from tests.unit.deployments.engine.following import engine_turns
from tests.unit.deployments.engine.vllm_server import MODEL, Client, new_renderer
from tests.unit.deployments.upstream.originals import unpatched

CONTEXT = 2048
U = {"role": "user", "content": "hi"}

patched = unpatched(prompt_lengths.PATCH, then=True)


class Uncomputing(Client):
    """Its way to the engine's core ends here."""

    def __init__(self) -> None:
        super().__init__(*new_renderer(CONTEXT))
        self.vllm_config = VllmConfig(model_config=self.model_config)
        self.input_processor = InputProcessor(self.vllm_config, self.renderer)

    def generate(self, *_: Any, **options: Any) -> AsyncIterator[Any]:
        raise AssertionError("nothing is to be computed")


@pytest.fixture(scope="module")
def server() -> EngineTurns:
    return served()


@functools.cache
def served() -> EngineTurns:
    client = Uncomputing()
    keep_text(client.online)
    keep_tokens(client.online)
    app = client.app("chat", "messages", "responses", "completion")
    # As vLLM's own way to make the app ends.
    app.middleware_stack = app.build_middleware_stack()
    explain_refusals(app)
    skip_media_cache(client.online)
    return engine_turns(app, client)


def post(server: EngineTurns, path: str, body: Any) -> httpx.Response:
    return ask(server, "POST", path, json={"model": MODEL, **body})


def refused(server: EngineTurns, path: str, body: Any) -> dict[str, Any]:
    """The error as a client is told it."""
    reply = post(server, wire.CHECK_PREFIX + path, body)
    error = from_engine(reply.status_code, reply.json())
    assert error.status == 400, reply.text
    told: dict[str, Any] = error.body(path)["error"]
    assert "pydantic" not in reply.text
    assert not re.search(r"[A-Z]\w+Param|validation error|list\[|input_value", json.dumps(told))
    return told


# --- Lengths -------------------------------------------------------------------------------------

# `tests/engines/http/test_refused.py` has what each API says of prompts and outputs that are too
# long. Each word is a token; a chat's template adds some.
PROMPTS: dict[str, Any] = {
    CHAT: lambda text: {"messages": [{"role": "user", "content": text}]},
    COMPLETIONS: lambda text: {"prompt": text},
    MESSAGES: lambda text: {"messages": [{"role": "user", "content": text}]},
    RESPONSES: lambda text: {"input": text},
}
CAPS = {
    CHAT: "max_completion_tokens",
    COMPLETIONS: "max_tokens",
    MESSAGES: "max_tokens",
    RESPONSES: "max_output_tokens",
}


def counted(server: EngineTurns, path: str, words: int) -> int:
    """How many tokens a prompt has, by one that is shorter."""
    body = {**PROMPTS[path]("hello " * 100), CAPS[path]: 1}
    reply = post(server, wire.CHECK_PREFIX + path, body)
    assert reply.status_code == 200, reply.text
    return len(reply.json()["prompts"][0]) + words - 100


def test_a_chats_older_cap_is_named_too(server: EngineTurns) -> None:
    assert refused(server, CHAT, {"messages": [U], "max_tokens": 32_000})["param"] == "max_tokens"


def test_token_ids_are_judged_alike(server: EngineTurns) -> None:
    told = refused(server, COMPLETIONS, {"prompt": [5] * 1500, "max_tokens": 600})
    assert (told["code"], told["param"]) == ("invalid_value", "max_tokens")
    for cap in ({"max_tokens": 1}, {"max_tokens": None}):
        told = refused(server, COMPLETIONS, {"prompt": [5] * 2048, **cap})
        assert told["code"] == "context_length_exceeded"
        assert "2048 tokens" in told["message"]


def test_what_cannot_fit_is_not_tokenized(server: EngineTurns) -> None:
    told = refused(server, MESSAGES, {**PROMPTS[MESSAGES]("x" * 500_000), "max_tokens": 1})
    said = rf"prompt is too long: (50\d{{4}}) characters > {CONTEXT} tokens maximum"
    assert re.fullmatch(said, told["message"])


@pytest.mark.parametrize("path", PROMPTS)
def test_a_default_of_the_clients_gets_what_room_there_is(server: EngineTurns, path: str) -> None:
    body = {**PROMPTS[path]("hello " * 1000), CAPS[path]: 32_000}
    reply = post(server, wire.CHECK_PREFIX + path + wire.ROOM_LEFT, body)
    assert reply.status_code == 200, reply.text
    assert len(reply.json()["prompts"][0]) == counted(server, path, 1000)
    # Another request's is its own.
    assert post(server, wire.CHECK_PREFIX + path, body).status_code == 400
    too_long = {**PROMPTS[path]("hello " * 3000), CAPS[path]: 32_000}
    reply = post(server, wire.CHECK_PREFIX + path + wire.ROOM_LEFT, too_long)
    error = from_engine(reply.status_code, reply.json())
    assert error.code == "context_length_exceeded"


def test_tokens_are_counted_however_many_they_are(server: EngineTurns) -> None:
    reply = post(server, COUNT_TOKENS, PROMPTS[MESSAGES]("hello " * 5000))
    assert reply.status_code == 200, reply.text
    assert reply.json()["input_tokens"] == counted(server, MESSAGES, 5000)


def test_a_prompt_that_is_to_be_cut_is_cut(server: EngineTurns) -> None:
    body = {**PROMPTS[RESPONSES]("hello " * 5000), "truncation": "auto", "max_output_tokens": 48}
    reply = post(server, wire.CHECK_PREFIX + RESPONSES, body)
    assert reply.status_code == 200, reply.text
    assert len(reply.json()["prompts"][0]) == CONTEXT - 48
    told = refused(server, RESPONSES, {**body, "max_output_tokens": CONTEXT + 1})
    assert (told["code"], told["param"]) == ("invalid_value", "max_output_tokens")


# --- Bodies that are none ------------------------------------------------------------------------


def said(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(parts)}]}


def called(**call: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]}


def formatted(form: Any) -> dict[str, Any]:
    return {"response_format": form}


def schema(schema: Any) -> dict[str, Any]:
    return formatted({"type": "json_schema", "json_schema": schema})


def url(url: Any) -> dict[str, Any]:
    return said({"type": "image_url", "image_url": url})


STRING, LIST, OBJECT, REQUIRED = (
    "must be a string",
    "must be a list",
    "must be an object",
    "is required",
)
STRING_OR_LIST = "must be a string or a list"
BLOCKS = "'text', 'image', 'tool_use', 'tool_result', 'tool_reference', 'thinking', "
PART = "messages.0.content.0"
CALL, TOOL_CALL = {"name": "f", "arguments": "{}"}, "messages.0.tool_calls.0"
ITEM = {"type": "function_call", "call_id": "x", "name": "f"}
USE = {"type": "tool_use", "id": "a", "name": "f"}
# What a request has beside the field that is wrong, by path.
PLAIN: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [U]},
    COMPLETIONS: {"prompt": "a"},
    MESSAGES: {"messages": [U], "max_tokens": 5},
    RESPONSES: {"input": "x"},
}
# The field as its client wrote it, what it is sent, and what is said of it.
WRONG: dict[str, list[tuple[str, dict[str, Any], str]]] = {
    CHAT: [
        ("stop", {"stop": 5}, STRING_OR_LIST),
        ("stop.1", {"stop": ["a", 5]}, STRING),
        ("messages.2.content", {"messages": [U, U, U | {"content": 5}]}, STRING_OR_LIST),
        (f"{PART}.type", said({"text": "x"}), REQUIRED),
        (f"{PART}.type", said({"type": "smell"}),
         "must be 'text', 'image_url', 'input_audio' or 'file'"),
        (f"{PART}.image_url.url", url({"url": 5}), STRING),
        (f"{TOOL_CALL}.function.name",
         called(id="a", type="function", function=CALL | {"name": 5}), STRING),
        (f"{TOOL_CALL}.function", called(id="a", type="function"), REQUIRED),
        ("tools.0.function", {"tools": [{"type": "function"}]}, REQUIRED),
        ("temperature", {"temperature": "hot"}, "must be a number"),
        ("stream", {"stream": "perhaps"}, "must be true or false"),
        ("logit_bias.5", {"logit_bias": {"5": "a"}}, "must be a number"),
        ("seed", {"seed": 2**63}, f"must be less than or equal to {2**63 - 1}"),
        ("response_format.type", formatted({"type": "poem"}),
         "must be 'text', 'json_object', 'json_schema' or 'structural_tag'"),
        ("response_format.json_schema.name", schema({"name": 5}), STRING),
    ],
    COMPLETIONS: [
        ("stop", {"stop": 5}, STRING_OR_LIST),
        ("prompt", {"prompt": {"a": 1}}, "must be a list or a string"),
    ],
    MESSAGES: [
        ("stop_sequences", {"stop_sequences": 5}, LIST),
        ("", {"stop_sequences": [""]}, "stop_sequences cannot contain an empty string."),
        ("system", {"system": 5}, STRING_OR_LIST),
        ("system.0.text", {"system": [{"type": "text", "text": 5}]}, STRING),
        ("messages.0.role", {"messages": [{"role": "pope", "content": "x"}]},
         "must be 'user', 'assistant' or 'system'"),
        (f"{PART}.type", said({"type": "scent"}), f"must be {BLOCKS}'redacted_thinking'"),
        (f"{PART}.input", said(USE | {"input": "x"}, role="assistant"), OBJECT),
        ("tools.0.input_schema", {"tools": [{"name": "a"}]}, REQUIRED),
        ("", {"tool_choice": {"type": "tool"}}, "tool_choice.name is required when type is 'tool'"),
        ("max_tokens", {"max_tokens": None}, "must be an integer"),
    ],
    RESPONSES: [
        ("input", {"input": 5}, STRING_OR_LIST),
        ("input.0.arguments", {"input": [ITEM | {"arguments": 5}]}, STRING),
        ("input.0.content.0.text",
         {"input": [{"role": "user", "content": [{"type": "input_text", "text": 5}]}]}, STRING),
        ("tools.0.name", {"tools": [{"type": "function"}]}, REQUIRED),
        ("tool_choice", {"tool_choice": "perhaps"},
         "must be 'none', 'auto', 'required' or an object"),
        ("text.format.type", {"text": {"format": {"type": "poem"}}},
         "must be 'text', 'json_schema' or 'json_object'"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "field", "sent", "said"),
    [(path, *row) for path, rows in WRONG.items() for row in rows],
)
def test_a_field_is_named_as_its_client_wrote_it(
    server: EngineTurns, path: str, field: str, sent: Any, said: str
) -> None:
    told = refused(server, path, PLAIN[path] | sent)
    message = f"{field}: {said}" if field else said
    if path == MESSAGES:
        # Anthropic's errors have no field for it.
        assert told["message"].startswith(message)
    else:
        assert (told["param"], told["message"]) == (field, message)


@pytest.mark.parametrize(
    ("content", "type_", "said"),
    [(b"{}", "text/plain", "Only 'application/json' is allowed"), (b"{", "application/json", "")],
)
def test_what_is_no_json_is_refused_too(
    server: EngineTurns, content: bytes, type_: str, said: str
) -> None:
    reply = ask(server, "POST", CHAT, content=content, headers={"content-type": type_})
    assert reply.status_code == 400
    assert said in reply.json()["error"]["message"]


def test_nothing_of_the_request_is_repeated(server: EngineTurns) -> None:
    body = {"messages": [{"role": "user", "content": {"private": "diary"}}]}
    reply = post(server, wire.CHECK_PREFIX + CHAT, body)
    assert reply.status_code == 400
    assert "diary" not in reply.text
