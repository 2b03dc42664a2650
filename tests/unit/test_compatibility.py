"""What is made of other projects' tests: nothing fails or passes unnoticed, and the docs say it."""

import tomllib
from pathlib import Path

import pytest

from tests.acceptance.compatibility import openresponses_suite, vllm_suite
from tests.acceptance.compatibility.outcomes import (
    Listed,
    Outcome,
    kept_by_the_engine,
    read,
    surprises,
)
from tests.checkout import ROOT

LISTS = [vllm_suite.LIST, openresponses_suite.LIST]
PASSED, FAILED = Outcome(True), Outcome(False, "404")
LISTED = [Listed("no such model", True, ("a", "b")), Listed("not served", False, ("c",))]


def test_what_fails_is_listed_and_what_is_listed_fails() -> None:
    outcomes = {"a": FAILED, "b": FAILED, "c": FAILED, "d": PASSED}
    assert surprises(outcomes, LISTED) == []


@pytest.mark.parametrize(
    ("case", "outcome", "said"),
    [
        ("d", FAILED, "d: fails, and is not listed: 404"),
        ("a", PASSED, "a: is listed, and passes: take it off the list"),
        ("a", None, "a: is listed, and no such case was run: take it off the list"),
    ],
)
def test_what_the_list_does_not_say_is_found(case: str, outcome: Outcome | None, said: str) -> None:
    outcomes = {"a": FAILED, "b": FAILED, "c": FAILED, "d": PASSED, case: outcome}
    there = {name: what for name, what in outcomes.items() if what is not None}
    assert surprises(there, LISTED) == [said]


@pytest.mark.parametrize("outcome", [PASSED, FAILED])
def test_what_differs_between_machines_may_do_either(outcome: Outcome) -> None:
    listed = [Listed("its arithmetic", True, ("a",), sometimes=True)]
    assert surprises({"a": outcome}, listed) == []
    assert kept_by_the_engine({"a": outcome}, listed) == []


@pytest.mark.parametrize("file", LISTS, ids=lambda file: file.stem)
def test_the_docs_have_each_reason_and_how_many_cases_it_is_for(file: Path) -> None:
    text = (ROOT / "docs" / "apis.md").read_text()
    rows = [f"| {len(entry.cases)} | {entry.reason} |" for entry in read(file)]
    assert rows
    assert [row for row in rows if row not in text] == []


def test_the_tests_are_of_the_version_that_engines_run() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"vllm=={vllm_suite.VERSION}" in project["optional-dependencies"]["cuda"]
