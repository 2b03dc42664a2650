"""The limits of one request, each on both sides."""

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conserve import budget
from conserve.apis import CHAT, COMPLETIONS
from conserve.errors import ApiError

USER = {"role": "user", "content": "x"}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def chat(**more: Any) -> dict[str, Any]:
    return {"messages": [USER], **more}


def prompted(prompt: Any, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, **more}


def nested(depth: int) -> Any:
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"x": value}
    return value


def refusal(body: dict[str, Any]) -> ApiError | None:
    is_chat = "prompt" not in body
    try:
        budget.check_raw(json.dumps(body).encode(), is_chat)
        budget.check(body, CHAT if is_chat else COMPLETIONS)
    except ApiError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("kept", "more", "param"),
    [
        # The body, its lists of messages and tools, one of each, and the list in the tool.
        (chat(tools=[{"x": [[]] * 16_378}]), chat(tools=[{"x": [[]] * 16_379}]), None),
        (chat(x={str(n): n for n in range(65_531)}), chat(x=list(range(65_532))), "x"),
        (chat(x=nested(63)), chat(x=nested(64)), "x"),
        (
            {"messages": [{**USER, "x": nested(61)}]},
            {"messages": [{**USER, "x": nested(62)}]},
            "messages",
        ),
        (prompted("x", x=nested(63)), prompted("x", x=nested(64)), "x"),
        ({"messages": [USER] * 6144}, {"messages": [USER] * 6145}, "messages"),
        (
            {"messages": [{"role": "user", "content": ["x"] * 2047}]},
            {"messages": [{"role": "user", "content": ["x"] * 2048}]},
            "messages",
        ),
        (
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [CALL]}] * 1536},
            {"messages": [{"role": "assistant", "tool_calls": [CALL]}] * 1537},
            "messages",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "odd"}]}]},
            {"messages": [{"role": "user", "content": [[]]}]},
            "messages",
        ),
        (chat(tools=[{}] * 512), chat(tools=[{}] * 513), "tools"),
        (chat(n=128), chat(n="2"), "n"),
        (chat(structured_outputs={}), chat(structured_outputs=False), "structured_outputs"),
        (chat(structured_outputs=None), chat(structured_outputs=-1), "structured_outputs"),
        (chat(n=2.0), chat(n=2.5), "n"),
        (chat(n=1), chat(n=True), "n"),
        (chat(stream=True), chat(stream="yes"), "stream"),
        (
            chat(tools=["x" * 65_000], tool_choice="required"),
            chat(tools=["x" * 66_000], tool_choice="required"),
            "tools",
        ),
        (
            chat(tools=["x" * 66_000], tool_choice="auto"),
            chat(tools=["x" * 66_000], tool_choice={"type": "function"}),
            "tools",
        ),
        (chat(stop=["x"] * 64), chat(stop=["x"] * 65), "stop"),
        (chat(stop="x" * 64), chat(stop="x" * 1025), "stop"),
        (chat(stop=["x" * 1024]), chat(stop=["x" * 1025]), "stop"),
        (chat(bad_words=["x" * 256]), chat(bad_words=["x" * 257]), "bad_words"),
        (chat(stop_token_ids=[1] * 1024), chat(stop_token_ids=[1] * 1025), "stop_token_ids"),
        (
            chat(logit_bias={str(n): 1 for n in range(1024)}),
            chat(logit_bias={str(n): 1 for n in range(1025)}),
            "logit_bias",
        ),
        (
            chat(vllm_xargs={str(n): 1 for n in range(128)}),
            chat(vllm_xargs={str(n): 1 for n in range(129)}),
            "vllm_xargs",
        ),
        (
            # {"regex": ""} is 13 characters.
            chat(structured_outputs={"regex": "x" * 32_755}),
            chat(structured_outputs={"regex": "x" * 32_756}),
            "structured_outputs",
        ),
        (
            chat(response_format={"x": 1}),
            chat(response_format={"x": "y" * 40_000}),
            "response_format",
        ),
        (chat(n=128), chat(n=129), "n"),
        (prompted(["x"] * 64, n=2), prompted(["x"] * 65, n=2), "n"),
        (prompted(["x"] * 128), prompted(["x"] * 129), "prompt"),
        (prompted([7] * 131_072), prompted([7] * 131_073), "prompt"),
        (prompted([[7] * 1024] * 128), prompted([[7] * 1025] * 128), "prompt"),
        (prompted([0, 2**31 - 1]), prompted([0, 2**31]), "prompt"),
        (prompted([[1], [0]]), prompted([[1], [-1]]), "prompt"),
        (prompted([1, 0]), prompted([1, False]), "prompt"),
        (prompted([[1]]), prompted([[True]]), "prompt"),
        (prompted([1]), prompted([10**400]), "prompt"),
        (prompted([1]), prompted([1.0]), "prompt"),
        (prompted([1]), prompted([1, "x"]), "prompt"),
        (prompted(["x"]), prompted(["x", [1]]), "prompt"),
        (prompted(["x"]), prompted([{}]), "prompt"),
        (prompted("x"), prompted({"x": 1}), "prompt"),
        (prompted("x"), prompted([]), "prompt"),
    ],
)
def test_what_is_just_enough_and_one_more(
    kept: dict[str, Any], more: dict[str, Any], param: str | None
) -> None:
    assert refusal(kept) is None
    error = refusal(more)
    assert error is not None
    assert error.status == 400
    assert len(error.message) < 300
    if error.param is not None or param not in (None, "x"):
        assert error.param == (param or "tools")


@pytest.mark.parametrize("messages", [None, [], "x", ["x"], [{}], [{"role": 5}], {"role": "user"}])
def test_messages_that_are_none(messages: Any) -> None:
    error = refusal({"messages": messages})
    assert error is not None
    assert error.param == "messages"


def test_odd_values_are_for_the_engine_to_judge() -> None:
    assert refusal(chat(n=-1, stop=5, logit_bias=None, tools="x", vllm_xargs=[1])) is None


@pytest.mark.parametrize("calls", ["x", 5, {"a": 1}, True])
def test_calls_that_are_no_list(calls: Any) -> None:
    """The engine would pass on Python's message about iterating over them."""
    error = refusal({"messages": [USER, {**USER, "tool_calls": calls}]})
    assert error is not None
    assert (error.status, error.param) == (400, "messages")
    assert error.message == "messages[1].tool_calls must be a list"
    assert refusal({"messages": [{**USER, "tool_calls": None}]}) is None


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
def test_a_cap_that_leaves_nothing_is_named_as_it_is_written(name: str) -> None:
    error = refusal(chat(**{name: 0}))
    assert error is not None
    assert (error.status, error.param) == (400, name)
    assert error.message == f"{name} must be at least 1, and is 0"
    assert refusal(chat(**{name: 1})) is None


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": [' + b"[]," * 17_000 + b"1]}",
        b'{"messages": [' + b"{}," * 17_000,
        b'{"messages": [' + b"1," * 70_000 + b"1]}",
        b'{"x": "\\\\", "messages": [' + b'"\\\\\\"",' * 70_000 + b"1]}",
        b"[" * 70_000,
    ],
)
def test_too_much_is_refused_unparsed(body: bytes) -> None:
    with pytest.raises(ApiError, match="65536 values"):
        budget.check_raw(body, chat=True)


@settings(deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from([1, 2, 3, 64, 65_535]),
    st.text(st.sampled_from('",[]{}\\\\:é'), max_size=50),
)
def test_what_stands_in_texts_does_not_count(seed: int, before: int, text: str) -> None:
    """Wherever they are cut, and whatever is escaped in them."""
    rng = random.Random(seed)
    texts = [text, ",[{" * 50_000, '\\"' * rng.randrange(3), ",\\" * 40_000]
    rng.shuffle(texts)
    body = {"p": "x" * before, "messages": [{"role": "user", "content": one} for one in texts]}
    budget.check_raw(json.dumps(body, ensure_ascii=rng.random() < 0.5).encode(), chat=True)


MOST_NUMBER = 2**63 - 1


@pytest.mark.parametrize(
    "more",
    [
        {"seed": MOST_NUMBER + 1},
        {"seed": -MOST_NUMBER - 2},
        {"vllm_xargs": {"a": [1, {"b": 10**30}]}},
        {"max_tokens": 8, "stream_interval": 2**80},
    ],
)
def test_a_number_that_takes_more_than_64_bits_is_named(more: dict[str, Any]) -> None:
    """An engine could not hand it to its core."""
    for body in (chat(**more), prompted("x", **more)):
        error = refusal(body)
        assert error is not None
        assert (error.status, error.param) == (400, list(more)[-1])


@pytest.mark.parametrize(
    "more",
    [
        {"seed": MOST_NUMBER, "n": 1, "temperature": 1e300, "stop": str(2**80)},
        {"messages": [{"role": "user", "content": [{"n": 2**80}]}]},
        {"tools": [{"function": {"parameters": {"maximum": 2**80}}}]},
    ],
)
def test_numbers_that_become_text_on_the_way_may_be_of_any_size(more: dict[str, Any]) -> None:
    assert refusal(chat(**more) if "messages" not in more else more) is None
