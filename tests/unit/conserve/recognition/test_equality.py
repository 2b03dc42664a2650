"""Messages that count as equal for their digest, and those that do not."""

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.conserve.recognition.digests import candidate_digests, tail_digest
from tests.unit.conserve.recognition.messages import IMAGE, SYSTEM, USER, called, said


def same(one: Any, other: Any) -> bool:
    return tail_digest([USER], one) == tail_digest([USER], other)


TEXT_PART = {"type": "text", "text": "Hello"}


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Hello", " \nHello\t "),
        ("Hello", [TEXT_PART]),
        ("Hello", [{**TEXT_PART, "cache_control": {"type": "ephemeral"}}]),
        ("Hello\nworld", [TEXT_PART, {"type": "text", "text": "world"}]),
        ([TEXT_PART, TEXT_PART, IMAGE], ["Hello\nHello", IMAGE]),
        ([TEXT_PART, IMAGE], [" Hello", dict(reversed(IMAGE.items()))]),
        (None, ""),
        (None, []),
        (None, [{"type": "text", "text": ""}]),
        ("half a pair \ud83d", "half a pair \ufffd"),
        ("\ud83d\ude00", "\U0001f600"),
    ],
)
def test_equal_content(role: str, one: Any, other: Any) -> None:
    assert same({"role": role, "content": one}, {"role": role, "content": other})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Hello", "Hel lo"),
        ("Hello", ""),
        ([TEXT_PART, IMAGE], [TEXT_PART]),
        ([TEXT_PART, IMAGE], [IMAGE, TEXT_PART]),
        ([IMAGE], [{"type": "image_url", "image_url": {"url": "data:image/png;base64,BBBB"}}]),
        ([IMAGE], json.dumps(IMAGE)),
        ([[TEXT_PART]], "Hello"),
        (None, 0),
    ],
)
def test_different_content(one: Any, other: Any) -> None:
    assert not same({"role": "user", "content": one}, {"role": "user", "content": other})


@pytest.mark.parametrize(
    "field",
    ["reasoning", "reasoning_content", "thinking", "name", "refusal", "annotations", "audio",
     "provider_specific_fields"],
)  # fmt: skip
def test_ignored_fields(field: str) -> None:
    assert same(said("Hi"), said("Hi", **{field: "anything"}))
    assert same(said("Hi"), said("Hi", **{field: None}))


def test_null_fields_and_empty_ones_are_absent_fields() -> None:
    assert same({"role": "assistant"}, said(""))
    assert same(said("Hi"), said("Hi", tool_calls=[]))
    for field in ("tool_calls", "function_call", "unknown"):
        assert same(said("Hi"), said("Hi", **{field: None}))


@pytest.mark.parametrize(
    "content",
    [
        "<think>Let me see.</think>\n\nHi",
        "\n<think>\nLet me see.\n</think>Hi",
        "<think></think>Hi ",
        "<think>a</think><think>b</think> Hi",
        "Let me see.</think>Hi",  # the template opened the block in the prompt
        [{"type": "text", "text": "<think>Let me see.</think>"}, {"type": "text", "text": "Hi"}],
        [{"type": "thinking", "thinking": "Let me see."}, {"type": "text", "text": "Hi"}],
    ],
)
def test_reasoning_in_the_content_is_ignored(content: Any) -> None:
    assert same(said("Hi"), said(content))


@pytest.mark.parametrize("content", ["<think>Let me", " <think>", "<think>a</think>\n<think>b"])
def test_an_answer_cut_while_reasoning_is_empty(content: str) -> None:
    assert same(said(""), said(content))


def test_only_reasoning_before_the_answer_is_ignored() -> None:
    assert not same(said("Hi <think>a</think>"), said("Hi <think>b</think>"))
    assert not same(said("<think>x</think>Hi <think>a</think>"), said("Hi"))
    user_one, user_other = ({"role": "user", "content": f"<think>{c}</think>Hi"} for c in "ab")
    assert not same(user_one, user_other)


THINKING = st.lists(st.sampled_from(["<think>", "</think>", " ", "a", "b\n"]), max_size=8)


@given(THINKING, st.lists(st.sampled_from(["a", " b", "<think>c</think>"]), min_size=1))
def test_an_agent_may_cut_the_reasoning_off_itself(inner: list[str], rest: list[str]) -> None:
    raw = "<think>" + "".join(inner).replace("</think>", "") + "</think>" + "".join(rest)
    assert same(said(raw), said(raw.partition("</think>")[2]))


def test_marks_alone_cost_no_quadratic_time() -> None:
    started = time.perf_counter()
    for text in ("</think>" * 200_000, "<think>" * 200_000 + "</think>" * 200_000):
        candidate_digests([said(text), USER])
    assert time.perf_counter() - started < 20


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a": 1, "b": [1, 2]}', '{"b":[1,2],"a":1}'),
        ('{"a": 1}', {"a": 1}),
        ('{"a": {"c": 1, "b": 2}}', ' {"a": {"b": 2, "c": 1}}\n'),
        ('{"city": "Z\\u00fcrich \\ud83d\\ude00"}', '{"city": "Zürich \U0001f600"}'),
        ('{"a": 1}', '{"a": 1.0}'),
        ('{"id": 12345678901234567890}', '{"id": 12345678901234567000}'),  # through JavaScript
        ('{"a": ' + "9" * 5000 + "}", '{"a": 1e999}'),
        ('{"a": "x\ny"}', '{"a": "x\\ny"}'),
        ("", "{}"),
        (None, {}),
        ('{"a": ', ' {"a":  '),
        ("[" * 5000, "[" * 5000 + " "),
    ],
)
def test_equal_arguments(one: Any, other: Any) -> None:
    assert same(called(one), called(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a": 1}', '{"a": "1"}'),
        ('{"a": 1}', '{"a": true}'),
        ('{"a": null}', "{}"),
        ('{"a": [1, 2]}', '{"a": [2, 1]}'),
        ('{"a": [[1], 2]}', '{"a": [[1, 2]]}'),
        ('{"a": []}', '{"a": {}}'),
        ('{"a": "x"}', '{"a": " x"}'),
        ("[]", "{}"),
        ("x", '"x"'),
    ],
)
def test_different_arguments(one: Any, other: Any) -> None:
    assert not same(called(one), called(other))


def test_call_ids_and_positions_are_ignored() -> None:
    assert same(called("{}", id="call_1"), called("{}", id="other"))
    function = {"name": "search", "arguments": "{}"}
    assert same(called("{}"), said(None, tool_calls=[{"index": 3, "function": function}]))
    custom = {"type": "custom", "custom": {"name": "sql", "input": "select 1"}}
    rewritten = {**custom, "id": "b", "index": 0, "function": None}
    assert same(said(tool_calls=[{**custom, "id": "a"}]), said(tool_calls=[rewritten]))


def test_calls_count_by_name_order_and_number() -> None:
    (one,) = called("{}")["tool_calls"]
    (other,) = called("{}", name="book")["tool_calls"]
    versions = [[], [one], [other], [one, other], [other, one], [one, one]]
    digests = {tail_digest([USER], said(None, tool_calls=calls)) for calls in versions}
    assert len(digests) == len(versions)


def test_tool_results_count_by_their_content() -> None:
    result = {"role": "tool", "tool_call_id": "call_1", "name": "search", "content": "3 flights"}
    assert same(result, {"role": "tool", "content": "3 flights", "tool_call_id": "x", "name": "y"})
    assert same(result, {"role": "tool", "content": "3 flights"})
    assert not same(result, {**result, "content": "2 flights"})


def test_developer_is_system() -> None:
    assert same(SYSTEM, {**SYSTEM, "role": "developer"})
    assert not same(SYSTEM, {**SYSTEM, "role": "user"})
