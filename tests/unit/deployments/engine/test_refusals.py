"""What vLLM's own server says of requests that it refuses, as a client is told it.

The server is vLLM's, on the embedded model's template and tokenizer, up to the call that would hand
a request to the engine's core.
"""

import functools
import json
import re
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from vllm.config import ModelConfig, VllmConfig
from vllm.entrypoints.anthropic import api_router as anthropic
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion import api_router as chats
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion import api_router as completions
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.openai.responses import api_router as responses
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.renderers import renderer_from_config
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.v1.engine.input_processor import InputProcessor

from conserve import wire
from conserve.apis import CHAT, COMPLETIONS, COUNT_TOKENS, MESSAGES, RESPONSES
from conserve.embedded import model_path
from conserve.errors import from_engine
from deployments.engine.check import RequestCheck, make_checkable
from deployments.engine.http_server import explain_refusals
from deployments.engine.tokenizing import keep_text, keep_tokens
from deployments.upstream import prompt_lengths
from tests.unit.deployments.asgi import ask
from tests.unit.deployments.upstream.originals import unpatched

MODEL = "m"
CONTEXT = 2048
U = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f"}}

patched = unpatched(prompt_lengths.PATCH, then=True)


class Client:
    """Stands in for vLLM's ``AsyncLLM``: its way to the engine's core ends here."""

    def __init__(self) -> None:
        self.model_config = ModelConfig(
            model=str(model_path()), served_model_name=MODEL, max_model_len=CONTEXT, dtype="float32"
        )
        self.vllm_config = VllmConfig(model_config=self.model_config)
        self.renderer = renderer_from_config(self.vllm_config)
        self.input_processor = InputProcessor(self.vllm_config, self.renderer)
        self.errored = False

    def check_admission(self, n: int) -> None: ...

    async def is_tracing_enabled(self) -> bool:
        return False

    def generate(self, *_: Any, **options: Any) -> AsyncIterator[Any]:
        raise AssertionError("nothing is to be computed")


@pytest.fixture(scope="module")
def server() -> RequestCheck:
    return served(tokenizer_cache_mb=16)


@functools.cache
def served(tokenizer_cache_mb: int) -> RequestCheck:
    client: Any = Client()
    template = client.renderer.tokenizer.chat_template
    shared = {"request_logger": None}
    online = OnlineRenderer(
        client.model_config,
        client.renderer,
        chat_template=None,
        chat_template_content_format="auto",
        enable_auto_tools=True,
        tool_parser="hermes",
        **shared,
    )
    keep_text(online)
    keep_tokens(online, tokenizer_cache_mb)
    models = OpenAIServingModels(client, [BaseModelPath(MODEL, str(model_path()))])
    of_chats: dict[str, Any] = {
        **shared,
        "online_renderer": online,
        "chat_template": template,
        "chat_template_content_format": "auto",
        "enable_auto_tools": True,
        "tool_parser": "hermes",
    }
    app = FastAPI()
    for router, name, handler in (
        (chats, "openai_serving_chat", OpenAIServingChat(client, models, "assistant", **of_chats)),
        (
            anthropic,
            "anthropic_serving_messages",
            AnthropicServingMessages(client, models, "assistant", **of_chats),
        ),
        (responses, "openai_serving_responses", OpenAIServingResponses(client, models, **of_chats)),
        (
            completions,
            "openai_serving_completion",
            OpenAIServingCompletion(client, models, online_renderer=online, **shared),
        ),
    ):
        app.include_router(router.router)
        setattr(app.state, name, handler)
    app.state.enable_server_load_tracking = False
    app.state.args = SimpleNamespace(log_error_stack=False, sse_keep_alive_interval=0)
    init_exception_handler(app)
    # As vLLM's own way to make the app ends.
    app.middleware_stack = app.build_middleware_stack()
    explain_refusals(app)
    make_checkable(client, online, ("generate",), lambda _: 0)
    return RequestCheck(app)


def post(server: RequestCheck, path: str, body: Any) -> httpx.Response:
    return ask(server, "POST", path, json={"model": MODEL, **body})


def refused(server: RequestCheck, path: str, body: Any) -> dict[str, Any]:
    """The error as a client is told it."""
    reply = post(server, wire.CHECK_PREFIX + path, body)
    error = from_engine(reply.status_code, reply.json())
    assert error.status == 400, reply.text
    told: dict[str, Any] = error.body(path)["error"]
    assert "pydantic" not in reply.text
    assert not re.search(r"[A-Z]\w+Param|validation error|list\[|input_value", json.dumps(told))
    return told


# --- Lengths -------------------------------------------------------------------------------------

# Each word is a token; a chat's template adds some.
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


def counted(server: RequestCheck, path: str, words: int) -> int:
    """How many tokens a prompt has, by one that is shorter."""
    body = {**PROMPTS[path]("hello " * 100), CAPS[path]: 1}
    reply = post(server, wire.CHECK_PREFIX + path, body)
    assert reply.status_code == 200, reply.text
    return len(reply.json()["prompts"][0]) + words - 100


@pytest.mark.parametrize(("stream", "tokenizer_cache_mb"), [(False, 0), (True, 16)])
@pytest.mark.parametrize("path", PROMPTS)
@pytest.mark.parametrize(
    ("words", "cap", "all_fits"),
    [
        # The prompt alone is too long, whatever is asked for.
        (5000, 1, None),
        (5000, 1500, None),
        (5000, 32_000, None),
        (2100, 40, None),
        # The output is: with the prompt, or alone.
        (1000, 1500, False),
        (2000, 100, False),
        (3, 32_000, False),
        (1000, 2049, False),
        (1000, 1000, True),
    ],
)
def test_prompt_and_output_are_told_apart(
    path: str, stream: bool, tokenizer_cache_mb: int, words: int, cap: int, all_fits: bool | None
) -> None:
    server = served(tokenizer_cache_mb)
    body = {**PROMPTS[path]("hello " * words), CAPS[path]: cap, "stream": stream}
    tokens = counted(server, path, words)
    if all_fits:
        reply = post(server, wire.CHECK_PREFIX + path, body)
        assert reply.status_code == 200, reply.text
        return
    told = refused(server, path, body)
    message = told["message"]
    if all_fits is None:
        if path == MESSAGES:
            assert message == f"prompt is too long: {tokens} tokens > {CONTEXT} maximum"
            return
        assert told["code"] == "context_length_exceeded"
        assert told["param"] == next(iter(PROMPTS[path]("")))
        assert f"{CONTEXT} tokens" in message
        assert f"resulted in {tokens} tokens" in message
        return
    if path == MESSAGES and cap > CONTEXT:
        assert message.startswith(f"max_tokens: {cap} > {CONTEXT}, which is the maximum")
        return
    if path == MESSAGES:
        assert message == (
            f"input length and `max_tokens` exceed context limit: {tokens} + {cap} > {CONTEXT}, "
            "decrease input length or `max_tokens` and try again"
        )
        return
    assert (told["code"], told["param"]) == ("invalid_value", CAPS[path])
    assert f"at most {CONTEXT - tokens} " in message


def test_a_chats_older_cap_is_named_too(server: RequestCheck) -> None:
    assert refused(server, CHAT, {"messages": [U], "max_tokens": 32_000})["param"] == "max_tokens"


def test_token_ids_are_judged_alike(server: RequestCheck) -> None:
    told = refused(server, COMPLETIONS, {"prompt": [5] * 1500, "max_tokens": 600})
    assert (told["code"], told["param"]) == ("invalid_value", "max_tokens")
    for cap in ({"max_tokens": 1}, {"max_tokens": None}):
        told = refused(server, COMPLETIONS, {"prompt": [5] * 2048, **cap})
        assert told["code"] == "context_length_exceeded"
        assert "2048 tokens" in told["message"]


def test_what_cannot_fit_is_not_tokenized(server: RequestCheck) -> None:
    told = refused(server, MESSAGES, {**PROMPTS[MESSAGES]("x" * 500_000), "max_tokens": 1})
    said = rf"prompt is too long: (50\d{{4}}) characters > {CONTEXT} tokens maximum"
    assert re.fullmatch(said, told["message"])


@pytest.mark.parametrize("path", PROMPTS)
def test_a_default_of_the_clients_gets_what_room_there_is(server: RequestCheck, path: str) -> None:
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


def test_tokens_are_counted_however_many_they_are(server: RequestCheck) -> None:
    reply = post(server, COUNT_TOKENS, PROMPTS[MESSAGES]("hello " * 5000))
    assert reply.status_code == 200, reply.text
    assert reply.json()["input_tokens"] == counted(server, MESSAGES, 5000)


def test_a_prompt_that_is_to_be_cut_is_cut(server: RequestCheck) -> None:
    body = {**PROMPTS[RESPONSES]("hello " * 5000), "truncation": "auto", "max_output_tokens": 48}
    reply = post(server, wire.CHECK_PREFIX + RESPONSES, body)
    assert reply.status_code == 200, reply.text
    assert len(reply.json()["prompts"][0]) == CONTEXT - 48
    told = refused(server, RESPONSES, {**body, "max_output_tokens": CONTEXT + 1})
    assert (told["code"], told["param"]) == ("invalid_value", "max_output_tokens")


# --- Bodies that are none ------------------------------------------------------------------------


def said(*parts: Any) -> dict[str, Any]:
    return {"messages": [U, {"role": "user", "content": list(parts)}]}


def called(**call: Any) -> dict[str, Any]:
    return {"messages": [U, {"role": "assistant", "content": None, "tool_calls": [call]}]}


CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": [U], "stop": 5}, "stop", "must be a string or a list"),
    ({"messages": [U], "stop": ["a", 5]}, "stop.1", "must be a string"),
    (
        {"messages": [U, {"role": "assistant", "content": "x"}, {"role": "user", "content": 5}]},
        "messages.2.content",
        "must be a string or a list",
    ),
    (
        {"messages": [U, {"role": "system", "content": 5}]},
        "messages.1.content",
        "must be a string or a list",
    ),
    (
        {"messages": [{"role": "tool", "content": "x", "tool_call_id": 5}]},
        "messages.0.tool_call_id",
        "must be a string",
    ),
    (said({"type": "text", "text": 5}), "messages.1.content.0.text", "must be a string"),
    (said({"type": "text"}), "messages.1.content.0.text", "is required"),
    (said("x"), "messages.1.content.0", "must be an object"),
    (said({"text": "x"}), "messages.1.content.0.type", "is required"),
    (
        said({"type": "smell"}),
        "messages.1.content.0.type",
        "must be 'text', 'image_url', 'input_audio' or 'file'",
    ),
    (
        said({"type": "image_url", "image_url": "http://x"}),
        "messages.1.content.0.image_url",
        "must be an object",
    ),
    (
        said({"type": "image_url", "image_url": {"url": 5}}),
        "messages.1.content.0.image_url.url",
        "must be a string",
    ),
    (
        called(id="a", type="function", function={"name": 5, "arguments": "{}"}),
        "messages.1.tool_calls.0.function.name",
        "must be a string",
    ),
    (called(id="a", type="function"), "messages.1.tool_calls.0.function", "is required"),
    (
        called(id="a", type="call", function={"name": "f", "arguments": "{}"}),
        "messages.1.tool_calls.0.type",
        "must be 'function' or 'custom'",
    ),
    ({"messages": [U], "tools": [{"type": "function"}]}, "tools.0.function", "is required"),
    ({"messages": [U], "tools": [TOOL, 5]}, "tools.1", "must be an object"),
    ({"messages": [U], "temperature": "hot"}, "temperature", "must be a number"),
    ({"messages": [U], "stream": "perhaps"}, "stream", "must be true or false"),
    ({"messages": [U], "logit_bias": {"5": "a"}}, "logit_bias.5", "must be a number"),
    ({"messages": [U], "seed": 2**63}, "seed", f"must be less than or equal to {2**63 - 1}"),
    (
        {"messages": [U], "reasoning_effort": "huge"},
        "reasoning_effort",
        "must be 'none', 'minimal', 'low', 'medium', 'high', 'xhigh' or 'max'",
    ),
    (
        {"messages": [U], "response_format": {"type": "poem"}},
        "response_format.type",
        "must be 'text', 'json_object', 'json_schema' or 'structural_tag'",
    ),
    ({"messages": [U], "response_format": "json"}, "response_format", "must be an object"),
    (
        {"messages": [U], "response_format": {"type": "json_schema", "json_schema": 5}},
        "response_format.json_schema",
        "must be an object",
    ),
    (
        {"messages": [U], "response_format": {"type": "json_schema", "json_schema": {"name": 5}}},
        "response_format.json_schema.name",
        "must be a string",
    ),
    (
        {"messages": [U], "response_format": {"type": "json_schema", "json_schema": {}}},
        "response_format.json_schema.name",
        "is required",
    ),
]


@pytest.mark.parametrize(("body", "field", "said"), CHATS)
def test_a_chats_field_is_named_as_its_client_wrote_it(
    server: RequestCheck, body: Any, field: str, said: str
) -> None:
    told = refused(server, CHAT, body)
    assert (told["param"], told["message"]) == (field, f"{field}: {said}")


COMPLETION = [
    ({"prompt": "a", "stop": 5}, "stop", "must be a string or a list"),
    ({"prompt": {"a": 1}}, "prompt", "must be a list or a string"),
    ({"prompt": "a", "echo": "x"}, "echo", "must be true or false"),
]


@pytest.mark.parametrize(("body", "field", "said"), COMPLETION)
def test_a_completions_field_too(server: RequestCheck, body: Any, field: str, said: str) -> None:
    told = refused(server, COMPLETIONS, body)
    assert (told["param"], told["message"]) == (field, f"{field}: {said}")


def blocks(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}]}


KINDS = "'text', 'image', 'tool_use', 'tool_result', 'tool_reference', 'thinking', "


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"messages": [U], "stop_sequences": 5}, "stop_sequences: must be a list"),
        ({"messages": [U], "stop_sequences": [5]}, "stop_sequences.0: must be a string"),
        (
            {"messages": [U], "stop_sequences": [""]},
            "stop_sequences cannot contain an empty string.",
        ),
        ({"messages": [U], "system": 5}, "system: must be a string or a list"),
        (
            {"messages": [U], "system": [{"type": "text", "text": 5}]},
            "system.0.text: must be a string",
        ),
        (
            {"messages": [{"role": "pope", "content": "x"}]},
            "messages.0.role: must be 'user', 'assistant' or 'system'",
        ),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content: must be a string or"),
        (blocks({"type": "text", "text": 5}), "messages.0.content.0.text: must be a string"),
        (
            blocks({"type": "scent"}),
            f"messages.0.content.0.type: must be {KINDS}'redacted_thinking'",
        ),
        (
            blocks({"type": "tool_result", "tool_use_id": "a", "content": 5}),
            "messages.0.content.0.content: must be a string or a list",
        ),
        (
            blocks({"type": "tool_use", "id": "a", "name": "f", "input": "x"}, role="assistant"),
            "messages.0.content.0.input: must be an object",
        ),
        ({"messages": [U], "tools": [{"name": "a"}]}, "tools.0.input_schema: is required"),
        ({"messages": [U], "tool_choice": "auto"}, "tool_choice: must be an object"),
        (
            {"messages": [U], "tool_choice": {"type": "tool"}},
            "tool_choice.name is required when type is 'tool'",
        ),
        ({"messages": [U], "max_tokens": None}, "max_tokens: must be an integer"),
    ],
)
def test_a_field_of_messages_too(server: RequestCheck, body: Any, said: str) -> None:
    told = refused(server, MESSAGES, {"max_tokens": 5, **body})
    assert told["message"].startswith(said)


@pytest.mark.parametrize(
    ("body", "field", "said"),
    [
        ({"input": 5}, "input", "must be a string or a list"),
        (
            {"input": [{"type": "function_call", "call_id": "x", "name": "f", "arguments": 5}]},
            "input.0.arguments",
            "must be a string",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": 5}]}]},
            "input.0.content.0.text",
            "must be a string",
        ),
        (
            {"input": [{"type": "function_call_output", "call_id": "x", "output": 5}]},
            "input.0.output",
            "must be a string or a list",
        ),
        ({"input": "x", "tools": [{"type": "function"}]}, "tools.0.name", "is required"),
        (
            {"input": "x", "tools": [{"type": "web_search", "search_context_size": "huge"}]},
            "tools.0.search_context_size",
            "must be 'low', 'medium' or 'high'",
        ),
        (
            {"input": "x", "tool_choice": "perhaps"},
            "tool_choice",
            "must be 'none', 'auto', 'required' or an object",
        ),
        (
            {"input": "x", "text": {"format": {"type": "poem"}}},
            "text.format.type",
            "must be 'text', 'json_schema' or 'json_object'",
        ),
        (
            {"input": "x", "text": {"format": {"type": "json_schema"}}},
            "text.format.name",
            "is required",
        ),
        ({"input": "x", "truncation": "x"}, "truncation", "must be 'auto' or 'disabled'"),
    ],
)
def test_a_field_of_responses_too(server: RequestCheck, body: Any, field: str, said: str) -> None:
    told = refused(server, RESPONSES, body)
    assert (told["param"], told["message"]) == (field, f"{field}: {said}")


@pytest.mark.parametrize(
    ("content", "type_", "said"),
    [(b"{}", "text/plain", "Only 'application/json' is allowed"), (b"{", "application/json", "")],
)
def test_what_is_no_json_is_refused_too(
    server: RequestCheck, content: bytes, type_: str, said: str
) -> None:
    reply = ask(server, "POST", CHAT, content=content, headers={"content-type": type_})
    assert reply.status_code == 400
    assert said in reply.json()["error"]["message"]


def test_nothing_of_the_request_is_repeated(server: RequestCheck) -> None:
    body = {"messages": [{"role": "user", "content": {"private": "diary"}}]}
    reply = post(server, wire.CHECK_PREFIX + CHAT, body)
    assert reply.status_code == 400
    assert "diary" not in reply.text
