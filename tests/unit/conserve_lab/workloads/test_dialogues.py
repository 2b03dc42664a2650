"""Dialogues stay valid chats whatever the model answers, and say what was recorded."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conserve_lab.records import Answer, TurnRequest
from conserve_lab.workloads import Arrivals, Workload, WorkloadError, dialogues
from conserve_lab.workloads.dialogues import NO_RESULT, RecordedTurn, continuation

Json = dict[str, Any]


def called(name: str, arguments: str, call_id: str = "") -> Json:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def play(script: Any, answer: Callable[[int], Answer]) -> list[TurnRequest]:
    turns = [script.next(None)]
    while (turn := script.next(answer(len(turns)))) is not None:
        turns.append(turn)
    return turns


def check_chat(messages: list[Json]) -> None:
    """What servers and templates refuse: unanswered calls, unasked results, the wrong order."""
    open_calls: list[str] = []
    for before, message in pairwise([{"role": "start"}, *messages]):
        role = message["role"]
        if role == "tool":
            assert isinstance(message["content"], str)
            open_calls.remove(message["tool_call_id"])
            continue
        assert not open_calls
        assert role != before["role"]
        assert role != "system" or before["role"] == "start"
        if role == "assistant":
            assert before["role"] in ("user", "tool")
            assert isinstance(message["content"], str) or message["tool_calls"]
            for call in message.get("tool_calls", ()):
                assert call["function"]["name"]
                assert isinstance(json.loads(call["function"]["arguments"]), dict)
                open_calls.append(call["id"])
            assert len(set(open_calls)) == len(open_calls)
        else:
            assert isinstance(message["content"], str)
    assert not open_calls
    assert messages[-1]["role"] in ("user", "tool")


def say(role: str, content: str | None, **fields: Any) -> Json:
    return {"role": role, "content": content} | fields


DIALOGUE = [
    say("system", "policy"),
    say("user", "hi"),
    say("assistant", None, tool_calls=[called("look", '{"a": 1}')]),
    say("tool", "found", tool_call_id="c", name="look"),
    say("assistant", "x" * 41),
    say("user", "bye"),
]


def write(folder: Path, *trajectories: Any) -> Path:
    path = folder / "dialogues.json"
    path.write_text(json.dumps([{"traj": messages} for messages in trajectories]))
    return path


def make(path: Path, **settings: Any) -> Workload:
    defaults: Json = {"conversations": 1, "arrivals": Arrivals("together")}
    return dialogues(data=path, **(defaults | settings))


def test_the_models_answers_take_the_place_of_the_recorded_ones(tmp_path: Path) -> None:
    ((_, script),) = make(write(tmp_path, DIALOGUE))
    first, second = play(script, lambda _: Answer("no idea"))
    assert first.body()["messages"] == [say("system", "policy"), say("user", "hi")]
    assert second.body()["messages"][2:] == [say("assistant", "no idea"), say("user", "found")]
    # The recorded call is 4 + 8 characters, the recorded text 41.
    assert [turn.body()["max_tokens"] for turn in (first, second)] == [3, 11]
    assert first.effective is first.output_tokens is first.prompt_tokens is None
    body = first.body() | {"messages": [], "max_tokens": 0}
    assert body == {
        "messages": [], "max_tokens": 0, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    ((_, script),) = make(tmp_path / "dialogues.json", max_output_tokens=7)
    assert [turn.body()["max_tokens"] for turn in play(script, lambda _: Answer("a"))] == [7, 7]


def test_calls_and_results_need_not_match() -> None:
    two = (called("a", "{}", "1"), called("b", "{}", "2"))
    turn = RecordedTurn((say("user", "and?"),), ("r1",), 9)
    assert continuation(Answer("", two), turn, "call")[1:] == [
        say("tool", "r1", tool_call_id="1"),
        say("tool", NO_RESULT, tool_call_id="2"),
        say("user", "and?"),
    ]
    more = RecordedTurn((), ("r1", "r2", "r3"), 9)
    assert continuation(Answer("", two[:1]), more, "call")[1:] == [
        say("tool", "r1", tool_call_id="1"),
        say("user", "r2\n\nr3"),
    ]


arguments = st.sampled_from(["{}", '{"a": 1}', "", "{", "[1]", "null", "7", '{"a": NaN}'])
answers = st.builds(
    Answer,
    st.text(max_size=8),
    st.lists(
        st.builds(called, st.sampled_from(["look", "find", ""]), arguments, st.just("")), max_size=3
    ).map(tuple),
)
following = st.lists(st.text(max_size=5), max_size=3)


@settings(max_examples=150, deadline=None)
@given(
    turns=st.lists(
        st.tuples(answers, following, following).filter(lambda turn: turn[1] or turn[2]), max_size=5
    )
)
def test_any_answers_make_a_valid_chat(turns: list[tuple[Answer, list[str], list[str]]]) -> None:
    messages = [say("system", "s"), say("user", "u")]
    for number, (answer, results, users) in enumerate(turns):
        turn = RecordedTurn(tuple(say("user", text) for text in users), tuple(results), 9)
        messages += continuation(answer, turn, f"call_{number}")
        check_chat(messages)


def test_gaps_are_exponential_and_of_the_seed(tmp_path: Path) -> None:
    path = write(tmp_path, [say("user", "u"), *[say("assistant", "a"), say("user", "u")] * 20])

    def gaps(**settings: Any) -> list[list[float]]:
        workload = make(path, conversations=100, **settings)
        return [[t.gap_s for t in play(script, lambda _: Answer("a"))] for _, script in workload]

    found = gaps(mean_gap_s=3.0)
    assert {first for first, *_ in found} == {0.0}
    later = [gap_s for _, *later in found for gap_s in later]
    assert np.mean(later) == pytest.approx(3.0, rel=0.1)
    assert np.std(later) == pytest.approx(3.0, rel=0.1)
    assert found == gaps(mean_gap_s=3.0)
    assert found != gaps(mean_gap_s=3.0, seed=1)
    assert {gap_s for made in gaps(mean_gap_s=0) for gap_s in made} == {0.0}


@pytest.mark.parametrize(
    ("messages", "place", "problem"),
    [
        ([*DIALOGUE[:2], {"content": "x"}], "item 2: traj[2].role", "expected system, user"),
        ([*DIALOGUE[:3], say("assistant", "x")], "item 2: message 4", "as the one before it"),
        ([say("user", "x"), say("tool", "y")], "item 2: message 2", "answers no call"),
        ([say("user", "x")], "item 2", "no assistant message"),
    ],
)
def test_a_broken_dialogue_is_named(
    tmp_path: Path, messages: list[Json], place: str, problem: str
) -> None:
    path = write(tmp_path, DIALOGUE, messages)
    with pytest.raises(WorkloadError) as error:
        make(path)
    assert all(part in str(error.value) for part in (str(path), place, problem))
