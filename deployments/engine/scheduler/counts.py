"""Counts what the scheduler has done, and what is with it now."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from conserve.engine_scheduling import KINDS, Kind


def _by_kind() -> dict[Kind, int]:
    return dict.fromkeys(KINDS, 0)


@dataclass(slots=True)
class Counts:
    """Since the engine's start.

    Attributes:
        begun: requests that have begun to run, by what they were: cold or resume.
        cut: chunks made smaller for those who decode, or put off for them, by what they were of.
        parts: prompts that began without room for all of them.
        preempted: requests, by level.
    """

    levels: int
    begun: dict[Kind, int] = field(default_factory=_by_kind)
    cut: dict[Kind, int] = field(default_factory=_by_kind)
    parts: int = 0
    preempted: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.preempted = [0] * self.levels


def by_level(levels: Iterable[int], number: int) -> list[int]:
    """How many are on each level."""
    found = [0] * number
    for level in levels:
        found[level] += 1
    return found
