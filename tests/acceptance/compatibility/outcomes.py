"""What a suite's cases came to, and what was known of them before."""

import tomllib
from dataclasses import dataclass
from pathlib import Path


class SuiteError(RuntimeError):
    """A suite cannot be had or run; the message says what to do."""


@dataclass(frozen=True)
class Outcome:
    """What became of one case.

    Args:
        passed: whether it did; one that its suite skips has not.
        message: why not, in a line or a few.
    """

    passed: bool
    message: str = ""


@dataclass(frozen=True)
class Listed:
    """Cases that are known not to pass, for one reason.

    Args:
        reason: why, for users to read.
        engine: whether a bare vLLM engine with the same model fails them as well.
        cases: their names.
        sometimes: whether they pass on some machines.
    """

    reason: str
    engine: bool
    cases: tuple[str, ...]
    sometimes: bool = False


def read(file: Path) -> list[Listed]:
    """The list in a file.

    Raises:
        ValueError: a case is in it twice.
    """
    listed = [
        Listed(
            entry["reason"],
            entry["engine"],
            tuple(entry["cases"]),
            entry.get("sometimes", False),
        )
        for entry in tomllib.loads(file.read_text())["listed"]
    ]
    names = [case for entry in listed for case in entry.cases]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{file.name} has these cases twice: {', '.join(twice)}")
    return listed


def surprises(outcomes: dict[str, Outcome], listed: list[Listed]) -> list[str]:
    """What the list does not say, a line each: a failure, a case that passes, one that is gone."""
    known = {case for entry in listed for case in entry.cases}
    always = {case for entry in listed if not entry.sometimes for case in entry.cases}
    found = [
        f"{case}: fails, and is not listed: {outcome.message}"
        for case, outcome in outcomes.items()
        if not outcome.passed and case not in known
    ]
    for case in sorted(known):
        if case not in outcomes:
            found.append(f"{case}: is listed, and no such case was run: take it off the list")
        elif outcomes[case].passed and case in always:
            found.append(f"{case}: is listed, and passes: take it off the list")
    return found


def kept_by_the_engine(outcomes: dict[str, Outcome], listed: list[Listed]) -> list[str]:
    """Cases that are laid to the engine, and that pass on one without ConServe: a line each."""
    engines = [entry for entry in listed if entry.engine and not entry.sometimes]
    laid = {case for entry in engines for case in entry.cases}
    return [
        f"{case}: is laid to the engine, and passes on a bare one: the router fails it"
        for case, outcome in outcomes.items()
        if case in laid and outcome.passed
    ]


def summary(outcomes: dict[str, Outcome]) -> str:
    """How many passed, of how many."""
    return f"{sum(outcome.passed for outcome in outcomes.values())} of {len(outcomes)} cases pass"
