"""The agents' tasks: tools, splits, schemas, and what counts as right."""

import re
from collections.abc import Iterator
from dataclasses import replace

from conserve_lab.agent import Session, Split, is_right, make_session, stated
from conserve_lab.agent.tasks import MAX_STEPS, MIN_STEPS
from conserve_lab.agent.words import split_of_number

SEEDS = range(60)


def _sessions(split: Split) -> Iterator[Session]:
    return (make_session(seed, split, tasks=2) for seed in SEEDS)


def test_the_calls_of_a_task_do_what_it_says() -> None:
    """The real tools give the recorded results, and the schemas list the tools."""
    for session in _sessions("held-out"):
        parameters = {
            schema["function"]["name"]: schema["function"]["parameters"]
            for schema in session.schemas
        }
        assert len(parameters) == len(session.schemas)
        for task in session.tasks:
            assert MIN_STEPS <= len(task.calls) <= MAX_STEPS
            assert tuple(map(session.toolbox.run, task.calls)) == task.results
            for call in task.calls:
                assert list(call.arguments) == parameters[call.name]["required"]


def test_the_question_tells_all_that_the_calls_need() -> None:
    """Arguments stand in the question, or are earlier results."""
    for session in _sessions("train"):
        for task in session.tasks:
            known = set(stated(re.sub(r"result \d", "", task.question)))
            for call, result in zip(task.calls, task.results, strict=True):
                assert set(call.arguments.values()) <= known
                known.add(result)


def test_the_splits_share_no_name_and_no_number_that_is_given() -> None:
    names: dict[str, set[str]] = {}
    for split in ("train", "held-out"):
        names[split] = {
            name
            for session in _sessions(split)
            for table in session.toolbox.tables.values()
            for subject, value in table.items()
            for name in (subject, value)
            if isinstance(name, str)
        }
        for session in _sessions(split):
            for table in session.toolbox.tables.values():
                numbers = [value for value in table.values() if isinstance(value, int)]
                assert {split_of_number(number) for number in numbers} <= {split}
    assert len(names["train"]) > 100
    assert len(names["held-out"]) > 50
    assert not names["train"] & names["held-out"]


def test_what_is_right() -> None:
    session = make_session(3, "held-out")
    task = replace(session.tasks[0], results=(41, "Mira Stone"), report="all")
    assert is_right(task, task.answer)
    assert is_right(task, 'Step 1 gave 41, and step 2 "Mira Stone".')
    for wrong in (
        "",
        "41",
        'It is 42 and "Mira Stone".',
        'It is "Mira Stone" and 41.',
        'It is 41 and "Mira Castle".',
        'It is 41, "Mira Stone" and 7.',
        "It is 41 and Mira Stone.",
    ):
        assert not is_right(task, wrong), wrong
    last = replace(task, report="last")
    assert is_right(last, last.answer)
    assert not is_right(last, task.answer)
