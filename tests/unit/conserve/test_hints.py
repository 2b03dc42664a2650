"""Clients' hints beside their messages."""

import math
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conserve.hints import MOST_S, NAMES, Hints, InvalidHint, Name, hints

OURS = [name for name in NAMES if name.must_be is not None]
OTHERS = [name for name in NAMES if name.must_be is None]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=6,
)


def named(name: Name) -> str:
    return name.name


def said(name: Name, value: Any) -> Hints:
    """The hints of a request with one value under this name."""
    if not name.in_body:
        return hints({name.name.lower(): str(value)}, {})
    for part in reversed(name.name.split(".")):
        value = {part: value}
    return hints({}, value)


def test_every_hint_has_a_name_of_our_own_that_comes_first() -> None:
    first: dict[str, Name] = {}
    for name in NAMES:
        first.setdefault(name.meaning, name)
    # A parent depends on several headers: see `conserve.identity.parent_id`.
    assert {*first, "parent"} == {field.name for field in fields(Hints)}
    assert list(first.values()) == OURS
    assert all(name.name.startswith("X-ConServe-") for name in OURS)


def test_who_says_nothing_has_none() -> None:
    assert hints({}, {}) == Hints()
    assert hints({"x-conserve-priority": "  "}, {"priority": None, "nvext": {}}) == Hints()


@pytest.mark.parametrize(
    ("headers", "body", "found"),
    [
        ({"x-conserve-priority": " -3 "}, {}, Hints(priority=-3)),
        # Whatever Python takes for white space.
        ({"x-conserve-priority": "\x1f+3\x1f"}, {}, Hints(priority=3)),
        ({}, {"nvext": {"agent_hints": {"priority": 5}}}, Hints(priority=5)),
        ({"x-dynamo-request-priority": "7"}, {}, Hints(priority=7)),
        # vLLM's lowest goes first.
        ({}, {"priority": 4}, Hints(priority=-4)),
        ({"x-conserve-deadline-s": "2.5"}, {}, Hints(deadline_s=2.5)),
        ({"x-envoy-expected-rq-timeout-ms": "15000"}, {}, Hints(deadline_s=15)),
        ({"x-conserve-first-token-s": "1e-3"}, {}, Hints(first_token_s=0.001)),
        ({"x-conserve-expected-resume-s": "30"}, {}, Hints(expected_resume_s=30)),
        ({"x-conserve-last-step": "True"}, {}, Hints(last_step=True)),
        ({}, {"nvext": {"session_control": {"action": "close"}}}, Hints(last_step=True)),
        ({}, {"agent_hint": {"expected_resume": True}}, Hints(last_step=False)),
        *(
            ({}, {"vllm_xargs": {"agentic_context": context}}, Hints(last_step=True))
            # It may be a text.
            for context in ({"expected_resume": False}, '{"expected_resume": false}')
        ),
        (
            {"x-conserve-priority": "1"},
            {"nvext": {"agent_hints": {"priority": 2}}, "priority": 3},
            Hints(priority=1),
        ),
    ],
)
def test_each_name_means_what_it_does_to_its_owner(
    headers: dict[str, str], body: dict[str, Any], found: Hints
) -> None:
    assert hints(headers, body) == found


@pytest.mark.parametrize("name", OURS, ids=named)
@pytest.mark.parametrize("value", ["soon", "-1e12", "1_0", "٣", "inf", "nan", "9" * 400, "0x1"])
def test_what_is_no_value_of_ours_is_refused_with_what_to_do(name: Name, value: str) -> None:
    with pytest.raises(InvalidHint) as caught:
        said(name, value)
    assert caught.value.source == name.name
    assert str(caught.value) == f"{name.name} must be {name.must_be}; mend it or leave it out"


@pytest.mark.parametrize("name", OTHERS, ids=named)
@pytest.mark.parametrize(
    "value", ["soon", "-1e12", "inf", "nan", "9" * 400, 10**400, -(2**40), math.inf, [], {"a": 1}]
)
def test_what_is_no_value_of_others_is_ignored(name: Name, value: object) -> None:
    assert said(name, value) == Hints()


@given(JSON, st.sampled_from([name for name in NAMES if name.in_body]))
def test_any_json_is_a_hint_or_none(value: object, name: Name) -> None:
    found = said(name, value)
    for field in fields(found):
        hint = getattr(found, field.name)
        assert hint is None or (field.name == name.meaning and -(2**31) <= hint <= 2**31)


@given(JSON)
def test_any_json_around_a_hint_is_no_error(value: object) -> None:
    for name in ("nvext", "agent_hint", "vllm_xargs"):
        assert hints({}, {name: value}) == Hints()


@given(st.floats(0, MOST_S))
def test_seconds_are_read_as_they_are_written(seconds: float) -> None:
    assert hints({"x-conserve-deadline-s": str(seconds)}, {}).deadline_s == seconds


@pytest.mark.parametrize(
    ("said", "in_time"),
    [
        ({}, None),
        ({"priority": 1}, None),
        ({"deadline_s": 10}, True),
        ({"deadline_s": 9}, False),
        ({"first_token_s": 2}, True),
        ({"first_token_s": 1}, False),
        ({"first_token_s": 2, "deadline_s": 9}, False),
        ({"first_token_s": 1, "deadline_s": 10}, False),
    ],
)
def test_an_answer_of_ten_seconds_whose_first_token_took_two(
    said: dict[str, Any], in_time: bool | None
) -> None:
    assert Hints(**said).in_time(10.0, 2.0) is in_time
