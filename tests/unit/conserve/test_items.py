"""The limits of requests of Messages and Responses, on both sides."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conserve import budget
from conserve.apis import COUNT_TOKENS, MESSAGES, RESPONSES
from conserve.errors import ApiError
from tests.unit.conserve.recognition.apis import told as apis
from tests.unit.conserve.recognition.messages import SEEDS

Json = dict[str, Any]

USER = {"role": "user", "content": "x"}
TEXT = {"type": "text", "text": "x"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "x"}
IMAGE = {"type": "input_image", "image_url": "data:,"}
TOOL = {"name": "f", "input_schema": {"type": "object"}}


def refusal(path: str, body: Json) -> ApiError | None:
    try:
        budget.check(body, path)
    except ApiError as error:
        return error
    return None


@settings(deadline=None)
@given(SEEDS, st.integers(0, 6))
def test_what_clients_send_is_let_through(seed: int, answers: int) -> None:
    rng = random.Random(seed)
    told = apis.random_conversation(rng, answers)
    assert refusal(MESSAGES, apis.messages(told, rng)) is None
    assert refusal(COUNT_TOKENS, apis.messages(told, rng)) is None
    assert refusal(RESPONSES, apis.responses(told, rng)) is None


@pytest.mark.parametrize(
    ("path", "kept", "more", "param"),
    [
        (MESSAGES, {"messages": [USER] * 6144}, {"messages": [USER] * 6145}, "messages"),
        (
            MESSAGES,
            {"messages": [{"role": "user", "content": [TEXT] * 2047}]},
            {"messages": [{"role": "user", "content": [TEXT] * 2048}]},
            "messages",
        ),
        (
            MESSAGES,
            {"messages": [USER], "system": [TEXT] * 2047},
            {"messages": [USER], "system": [TEXT] * 2048},
            "messages",
        ),
        (
            MESSAGES,
            {"messages": [{"role": "user", "content": [{"content": [TEXT] * 2046}]}]},
            {"messages": [{"role": "user", "content": [{"content": [TEXT] * 2047}]}]},
            "messages",
        ),
        (
            MESSAGES,
            {"messages": [USER], "stop_sequences": ["x"] * 64},
            {"messages": [USER], "stop_sequences": ["x"] * 65},
            "stop_sequences",
        ),
        (
            MESSAGES,
            {"messages": [USER], "tools": [TOOL] * 2000, "tool_choice": {"type": "auto"}},
            {"messages": [USER], "tools": [TOOL] * 2000, "tool_choice": {"type": "any"}},
            "tools",
        ),
        (RESPONSES, {"input": [OUTPUT] * 1092}, {"input": [OUTPUT] * 1093}, "input"),
        (RESPONSES, {"input": [CALL] * 5461}, {"input": [CALL] * 5462}, "input"),
        (
            RESPONSES,
            {"input": "x", "text": {"format": {"schema": "x" * 32_000}}},
            {"input": "x", "text": {"format": {"schema": "x" * 33_000}}},
            "text",
        ),
    ],
)
def test_a_limit_refuses_what_is_beyond_it_alone(
    path: str, kept: Json, more: Json, param: str
) -> None:
    if "tools" in kept:
        kept = {**kept, "tools": kept["tools"][:512]}
        more = {**more, "tools": [{**TOOL, "description": "x" * 200}] * 512}
    assert refusal(path, kept) is None
    error = refusal(path, more)
    assert error is not None
    assert (error.status, error.param) == (400, param)


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ("x", "input[1]"),
        ({}, "input[1].role"),
        ({"type": "web_search_call", "id": "x"}, "input[1].type"),
        ({"type": ["message"]}, "input[1].type"),
        ({"role": "tool", "content": "x"}, "input[1].role"),
        ({"role": "user"}, "input[1].content"),
        ({"role": "user", "content": [TEXT]}, "input[1].content[0]"),
        ({"role": "user", "content": ["x"]}, "input[1].content[0]"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input[1].content[0].text"),
        ({"role": "user", "content": "x", "status": 7}, "input[1].status"),
        ({"role": "user", "content": "x", "id": 7}, "input[1].id"),
        ({**CALL, "call_id": None}, "input[1].call_id"),
        ({**CALL, "name": 7}, "input[1].name"),
        ({**CALL, "arguments": {}}, "input[1].arguments"),
        ({**OUTPUT, "output": None}, "input[1].output"),
        ({**OUTPUT, "output": [IMAGE, {"type": "input_file", "file_id": "x"}]},
         "input[1].output[1]"),
        ({"type": "reasoning", "summary": "x"}, "input[1].summary"),
        ({"type": "reasoning", "encrypted_content": "x"}, "input[1].encrypted_content"),
        ({"type": "item_reference", "id": "msg_1_0"}, "input[1].type"),
        ({"id": "msg_1_0"}, "input[1].type"),
        ({"role": "assistant", "content": "x", "phase": "first"}, "input[1].phase"),
        ({"role": "assistant", "content": [IMAGE]}, "input[1].content[0]"),
        ({"role": "user", "content": [{**IMAGE, "image_url": None}]},
         "input[1].content[0].image_url"),
        ({"role": "user", "content": [{**IMAGE, "detail": "most"}]}, "input[1].content[0].detail"),
        ({"role": "user", "content": [{**IMAGE, "file_id": "x"}]}, "input[1].content[0].file_id"),
    ],
)  # fmt: skip
def test_items_that_the_engine_would_refuse_are_named(item: Any, param: str) -> None:
    error = refusal(RESPONSES, {"input": [USER, item]})
    assert error is not None
    assert (error.status, error.param) == (400, param)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (RESPONSES, {}),
        (RESPONSES, {"input": []}),
        (RESPONSES, {"input": 7}),
        (MESSAGES, {}),
        (MESSAGES, {"messages": []}),
        (MESSAGES, {"messages": ["x"]}),
        (MESSAGES, {"messages": [{"role": "user", "content": ["x"]}]}),
        (MESSAGES, {"messages": [USER], "system": ["x"]}),
    ],
)
def test_what_is_no_request_is_refused(path: str, body: Json) -> None:
    error = refusal(path, body)
    assert error is not None
    assert error.status == 400
