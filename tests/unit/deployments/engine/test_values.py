"""What requests may hold: each by the router's own reading, and then by vLLM's own server."""

import math
import typing
from typing import Any

import pytest
from anthropic.types.beta.message_create_params import MessageCreateParamsBase
from openai.types.completion_create_params import CompletionCreateParamsBase
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

from conserve import wire
from conserve.apis import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from conserve.errors import ApiError, from_engine
from conserve.fields import KNOWN, READ
from deployments.router.request import ClientRequest
from deployments.upstream import prompt_lengths
from tests.published_schemas import fields
from tests.unit.deployments.engine.test_refusals import MODEL, post, served
from tests.unit.deployments.engine.vllm_server import read
from tests.unit.deployments.upstream.originals import unpatched

Json = dict[str, Any]

patched = unpatched(prompt_lengths.PATCH, then=True)

U = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
PLAIN: dict[str, Json] = {
    CHAT: {"messages": [U]},
    COMPLETIONS: {"prompt": "hi"},
    MESSAGES: {"messages": [U], "max_tokens": 4},
    RESPONSES: {"input": "hi"},
}
ALL, CHATS, OPENAIS = tuple(PLAIN), (CHAT,), (CHAT, COMPLETIONS, RESPONSES)
LOGPROBS = {"include": ["message.output_text.logprobs"]}


def judged(path: str, body: Json) -> tuple[ClientRequest, list[list[int]]]:
    """A turn as its router understands it, and its prompts; raises ApiError as its client sees."""
    asked = read(path, {**PLAIN[path], **body})
    told = {**asked.body, "model": MODEL}
    reply = post(served(), wire.CHECK_PREFIX + asked.engine_path, told)
    if reply.status_code != 200:
        raise from_engine(reply.status_code, reply.json())
    return asked, reply.json()["prompts"]


# Paths, the fields that are asked for, and those that vLLM gets in their place (None: absent).
SERVED: list[tuple[tuple[str, ...], Json, Json]] = [
    (ALL, {"top_p": 0}, {"top_p": 1, "temperature": 0}),
    (ALL, {"top_p": 0, "temperature": 0.5}, {"top_p": 1, "temperature": 0}),
    ((CHAT, COMPLETIONS), {"temperature": 0, "n": 2}, {"temperature": 1, "top_p": 1e-6, "n": 2}),
    (OPENAIS, {"temperature": 2, "presence_penalty": -2, "logit_bias": {"5": -100}}, {}),
    (OPENAIS, {"seed": 42.0, "logit_bias": {}, "stop": []}, {}),
    (OPENAIS, {"stop": None, "seed": -1}, {}),
    ((CHAT, COMPLETIONS), {"n": 2.0, "max_tokens": 4.0}, {}),
    ((COMPLETIONS,), dict.fromkeys(("n", "best_of", "echo", "logprobs", "suffix", "user")), {}),
    ((COMPLETIONS,), {"n": 1, "best_of": 1}, {}),
    ((COMPLETIONS,), {"max_tokens": 0, "echo": True, "logprobs": 1}, {"max_tokens": 0}),
    (CHATS, {"logprobs": True, "top_logprobs": 20}, {}),
    ((RESPONSES,), {**LOGPROBS, "top_logprobs": 20}, {}),
    ((CHAT, COMPLETIONS), {"stream_options": {"include_usage": True}}, {"stream_options": None}),
    ((CHAT, MESSAGES), {"tools": []}, {"tools": None}),
    (CHATS, {"tools": [], "tool_choice": "auto"}, {"tools": None, "tool_choice": None}),
    ((MESSAGES,), {"tool_choice": {"type": "auto"}}, {"tool_choice": None}),
    ((MESSAGES,), {"max_tokens": 0}, {"max_tokens": 1}),
    ((MESSAGES,), {"temperature": 1, "system": "", "stop_sequences": []}, {"temperature": 1}),
]


@pytest.mark.parametrize(
    ("path", "body", "sent"), [(path, *row) for paths, *row in SERVED for path in paths]
)
def test_values_that_the_references_allow_are_served(path: str, body: Json, sent: Json) -> None:
    asked, _ = judged(path, body)
    assert {name: asked.body.get(name) for name in sent} == sent
    assert asked.ignored_fields == ()


# What is asked for, the field that the refusal names, and what it says.
REFUSED: list[tuple[tuple[str, ...], Json, str, str]] = [
    (ALL, {"temperature": math.nan}, "", "not valid JSON, which has no NaN"),
    (ALL, {"x": [math.inf]}, "", "not valid JSON, which has no Infinity"),
    (OPENAIS, {"temperature": 2.5}, "temperature", "[0, 2]"),
    ((MESSAGES,), {"temperature": 1.5}, "temperature", "1.5 is not from 0 to 1"),
    (ALL, {"top_p": 1.5}, "top_p", "1.5"),
    (ALL, {"seed": 2**64}, "seed", "64 bits"),
    ((CHAT, COMPLETIONS), {"n": 1.5}, "n", "an integer"),
    ((COMPLETIONS,), {"best_of": 3}, "best_of", "send n"),
    ((COMPLETIONS,), {"max_tokens": 0}, "max_tokens", "at least 1"),
    ((CHAT,), {"max_tokens": 0, "echo": True}, "max_tokens", "at least 1"),
    ((MESSAGES,), {"max_tokens": 0, "stream": True}, "max_tokens", "without stream"),
    ((MESSAGES,), {"max_tokens": -1}, "max_tokens", "at least 1"),
    (CHATS, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs of 21"),
    ((RESPONSES,), {**LOGPROBS, "top_logprobs": 21}, "top_logprobs", "top_logprobs of 21"),
    ((COMPLETIONS,), {"logprobs": 21}, "logprobs", "21"),
    (CHATS, {"top_logprobs": 2}, "top_logprobs", "`logprobs` must be set"),
    (OPENAIS[:2], {"stop": [""]}, "", "stop cannot contain an empty string"),
    (CHATS, {"tools": [], "tool_choice": "required"}, "tool_choice", "`tools` must be set"),
    ((MESSAGES,), {"tool_choice": {"type": "any"}}, "tool_choice", "send tools"),
    # Names of other servers and APIs.
    (OPENAIS, {"guided_choice": ["a"]}, "guided_choice", "structured_outputs"),
    (OPENAIS, {"guided_json": {"type": "object"}}, "guided_json", "structured_outputs"),
    (ALL, {"regex": "[0-9]"}, "regex", "send "),
    (ALL, {"grammar": "root ::= x"}, "grammar", "send "),
    (ALL, {"format": "json"}, "format", "send "),
    ((CHAT, COMPLETIONS), {"options": {"temperature": 0}}, "options", "fields of their own"),
    ((MESSAGES,), {"response_format": {"type": "json_object"}}, "response_format", "output_config"),
    ((RESPONSES,), {"response_format": {"type": "json_object"}}, "response_format", "text.format"),
    # Misspelt.
    ((CHAT, COMPLETIONS), {"respone_format": {}}, "respone_format", "mean response_format?"),
    (ALL, {"temprature": 0}, "temprature", "did you mean temperature?"),
    ((CHAT, COMPLETIONS), {"maxTokens": 4}, "maxTokens", "did you mean max_tokens?"),
    ((MESSAGES,), {"stop_sequence": ["a"]}, "stop_sequence", "did you mean stop_sequences?"),
    # Messages of a chat's.
    (CHATS, {"messages": [U, {"role": "model"}]}, "messages[1].role", "send role assistant"),
    (CHATS, {"messages": [{"role": "user", "content": None}]}, "messages", "[0].content must be"),
    (CHATS, {"messages": [U, {"role": "tool", "content": {"a": 1}}]}, "messages", "[1].content"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "field", "said"), [(path, *row) for paths, *row in REFUSED for path in paths]
)
def test_what_is_not_served_is_refused_by_name(
    path: str, body: Json, field: str, said: str
) -> None:
    with pytest.raises(ApiError) as error:
        judged(path, body)
    told = error.value.told(path)
    assert error.value.status == 400
    # Anthropic's errors have no field for it.
    assert (told.param or "") == ("" if path == MESSAGES else field)
    assert said in told.message
    assert field in told.message


@pytest.mark.parametrize("path", ALL)
def test_fields_that_have_no_effect_are_told(path: str) -> None:
    """But for null ones, and what each API's own clients send."""
    more = {"keep_alive": 5, "cache_prompt": False, "a,b\u00e9": 1, "think": None, "metadata": {}}
    asked = read(path, {**PLAIN[path], **more, "model": None, "models": []})
    assert asked.ignored_fields == ("keep_alive", "cache_prompt", "a?b?", "models")
    many = {f"some_other_name_{number}": 1 for number in range(1000)}
    assert len(read(path, {**PLAIN[path], **many}).ignored_fields) == 16


def test_known_fields_are_vllms_those_of_schemas_and_those_that_are_read() -> None:
    """A vLLM or a schema that has grown is looked at anew (`conserve/fields.toml`)."""
    hints = typing.get_type_hints
    requests: dict[str, tuple[Any, set[str]]] = {
        CHAT: (ChatCompletionRequest, fields(CHAT)),
        COMPLETIONS: (CompletionRequest, {*hints(CompletionCreateParamsBase)}),
        MESSAGES: (AnthropicMessagesRequest, fields(MESSAGES) | {*hints(MessageCreateParamsBase)}),
        RESPONSES: (ResponsesRequest, {*hints(ResponseCreateParamsBase)}),
    }
    for path, (model, schema) in requests.items():
        assert KNOWN[path] - READ == {*model.model_fields, *schema} - READ


# --- Histories that other clients keep ------------------------------------------------------------

TEXT = {"type": "text", "text": "yo"}
F = {"name": "f", "arguments": '{"a": 1}'}
EMPTY = {"name": "f", "arguments": "{}"}


def said(content: Any, **more: Any) -> list[Json]:
    return [U, {"role": "assistant", "content": content, **more}, {**U, "content": "go on"}]


def called(function: Json, ids: Json, answers: Json, **more: Any) -> list[Json]:
    """Two calls with their results."""
    calls = [{"function": function, **ids, **more}, {"id": "b", "type": "function", "function": F}]
    results = [{"role": "tool", "content": "3", **one} for one in ({"tool_call_id": "b"}, answers)]
    return [U, {"role": "assistant", "content": None, "tool_calls": calls}, *results]


ID, ANSWERS, TYPE = {"id": "call_1_0"}, {"tool_call_id": "call_1_0"}, {"type": "function"}


@pytest.mark.parametrize(
    ("kept", "plain"),
    [
        (said([{"type": "reasoning", "reasoning": "hm"}, TEXT]), said([TEXT], reasoning="hm")),
        (said([{"type": "thinking", "thinking": "hm"}, TEXT]), said([TEXT], reasoning="hm")),
        (said([{"type": "redacted_thinking", "data": "x"}, TEXT]), said([TEXT])),
        (said([{"type": "thinking"}, TEXT], reasoning="hm"), said([TEXT], reasoning="hm")),
        (said("yo", reasoning_details=[{"text": "hm"}, 5]), said("yo", reasoning="hm")),
        (said("yo", thinking_blocks=[{"thinking": "hm"}]), said("yo", reasoning="hm")),
        (said("yo", reasoning_details=7), said("yo")),
        (said([{"type": "output_text", "text": "yo", "annotations": []}]), said("yo")),
        ([{**U, "content": [{"type": "input_text", "text": "hi"}]}], [U]),
        (called(F, {}, {}), called(F, ID, ANSWERS, **TYPE)),
        (called(F, {"id": None}, {"tool_call_id": None}), called(F, ID, ANSWERS, **TYPE)),
        (called({"name": "f", "arguments": {"a": 1}}, ID, {}), called(F, ID, ANSWERS, **TYPE)),
        (called({"name": "f", "arguments": ""}, ID, {}), called(EMPTY, ID, ANSWERS, **TYPE)),
        (called({"name": "f"}, ID, {}), called(EMPTY, ID, ANSWERS, **TYPE)),
        (called(F, ID, {}, index=0, extra_content={}), called(F, ID, ANSWERS, **TYPE)),
    ],
)
def test_a_history_is_the_same_as_other_clients_keep_it(
    kept: list[Json], plain: list[Json]
) -> None:
    """The model is shown the same, and recognition takes it for the same."""
    found = []
    for messages in (kept, plain):
        asked, prompts = judged(CHAT, {"messages": messages, "tools": [TOOL]})
        shown = [(one.get("reasoning"), one.get("tool_call_id")) for one in asked.body["messages"]]
        found.append((prompts, asked.chain, shown))
    assert found[0] == found[1]
