"""Agents at work, with models that do right and wrong."""

import json
from typing import Any

import pytest

from conserve_lab.agent import make_session, transcript
from conserve_lab.records import Answer
from conserve_lab.workloads import Arrivals, Workload, agents
from conserve_lab.workloads.agents import AgentScript

TOGETHER = Arrivals("together", 1.0, 0)


def _scripts(workload: Workload) -> list[AgentScript]:
    found = []
    for _, script in workload:
        assert isinstance(script, AgentScript)
        found.append(script)
    return found


def _reference(index: int, tasks: int) -> list[dict[str, Any]]:
    """What a model that does all right says and is told."""
    return transcript(make_session(f"bench/3/{index}", "held-out", tasks=tasks))


@pytest.mark.parametrize("tasks", [1, 2])
def test_a_model_that_does_right_is_led_through_all_tasks(tasks: int) -> None:
    workload = agents(conversations=4, arrivals=TOGETHER, tasks=tasks, seed=3)
    assert workload.counts["conversations"] == 4
    for index, script in enumerate(_scripts(workload)):
        expected = _reference(index, tasks)
        turn, answer = script.next(None), None
        seen: list[dict[str, Any]] = []
        while turn is not None:
            body = turn.body()
            seen = body["messages"]
            assert body["tools"]
            assert turn.effective is None
            said = expected[len(seen)]
            assert said["role"] == "assistant"
            assert seen == expected[: len(seen)]
            answer = Answer(said["content"], tuple(said.get("tool_calls") or ()))
            turn = script.next(answer)
        assert len(seen) == len(expected) - 1
        assert script.right == [True] * tasks


def test_wrong_answers_are_told_and_do_not_stop_it() -> None:
    (script,) = _scripts(agents(conversations=1, arrivals=TOGETHER, tasks=2, seed=3))
    assert script.next(None) is not None
    second = script.next(Answer("It is nothing."))
    assert second is not None
    assert [m["role"] for m in second.body()["messages"]][-2:] == ["assistant", "user"]
    assert script.next(Answer("Still nothing.")) is None
    assert script.right == [False, False]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [('{"a": 1}', "no tool nope"), ("[1]", "no JSON object"), ("{", "are no JSON: ")],
)
def test_calls_that_no_tool_takes_get_an_error_and_end(arguments: str, said: str) -> None:
    (script,) = _scripts(agents(conversations=1, arrivals=TOGETHER, tasks=1, seed=3))
    call = {"id": "c", "type": "function", "function": {"name": "nope", "arguments": arguments}}
    turn = script.next(None)
    turns = 0
    while turn is not None:
        turns += 1
        turn = script.next(Answer("", (call,)))
        if turn is not None:
            last = turn.body()["messages"][-1]
            assert last["role"] == "tool"
            assert said in json.loads(last["content"])["error"]
    assert 2 < turns < 20
    assert script.right == [False]


def test_the_same_seed_gives_the_same_sessions_and_gaps() -> None:
    def plan(seed: int) -> list[Any]:
        found = []
        for script in _scripts(agents(conversations=3, arrivals=TOGETHER, seed=seed)):
            first = script.next(None)
            later = script.next(Answer("?"))
            assert first is not None
            assert later is not None
            found.append((script.conversation, first.gap_s, first.body(), later.gap_s))
        return found

    assert plan(3) == plan(3)
    assert plan(3) != plan(4)
    assert all(gap_s == 0.0 for _, gap_s, _, _ in plan(3))
