"""The seat of every workload: conversations, and when they arrive."""

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

import numpy as np

from conserve_lab.records import Answer, Script, TurnRequest

Pattern = Literal["poisson", "even", "together", "recorded"]

_DRAWN_AT_ONCE = 1024

T = TypeVar("T")
Arriving = tuple[float, Script]
"""Arrival in seconds from the run's start, and the conversation that arrives."""


class WorkloadError(ValueError):
    """A setting or a file is unusable; the message names it and says why, in one line."""


def require(met: bool, problem: str) -> None:
    if not met:
        raise WorkloadError(problem)


def at_least(least: float, **settings: float | None) -> None:
    """Check that settings are finite and not below this; None: not given."""
    for name, value in settings.items():
        met = value is None or least <= value < math.inf
        require(met, f"{name} is {value}; give a number from {least:g}")


@dataclass(frozen=True, slots=True)
class Workload:
    """Conversations, in ascending order of arrival. Each iteration starts them all anew.

    Its counts say what it comprises, and what was left out or assumed on the way, for the report;
    its notes are for whoever asked for it.
    """

    name: str
    counts: Mapping[str, int]
    make: Callable[[], Iterator[Arriving]]
    notes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Arriving]:
        return self.make()


Turns = Generator[TurnRequest, Answer | None, None]
"""A conversation's turns; each is sent the answer to it."""


class PlayedScript:
    def __init__(self, conversation: str, turns: Turns) -> None:
        self.conversation = conversation
        self._turns = turns

    def next(self, answer: Answer | None) -> TurnRequest | None:
        try:
            return self._turns.send(answer)
        except StopIteration:
            return None


@dataclass(frozen=True, slots=True)
class Arrivals:
    """An endless series of arrival times: open loop, whatever the system makes of them.

    Attributes:
        pattern: ``poisson``: independent exponential intervals; ``even``: equal intervals, the
            first conversation at 0; ``together``: all at 0; ``recorded``: as a recording says.
        at_s: what it says.

    Raises WorkloadError: an unknown pattern, or a rate that is not a positive number.
    """

    pattern: Pattern = "poisson"
    rate_per_s: float = 1.0
    seed: int = 0
    at_s: tuple[float | None, ...] = ()

    def __post_init__(self) -> None:
        known = get_args(Pattern)
        require(
            self.pattern in known,
            f"the arrival pattern is {self.pattern!r}; choose one of {', '.join(known)}",
        )
        require(
            math.isfinite(self.rate_per_s) and self.rate_per_s > 0,
            f"the arrival rate is {self.rate_per_s:g} conversations/s; give one above 0",
        )
        at_least(0, seed=self.seed)

    def times_s(self) -> Iterator[float]:
        """Ascending seconds from the run's start, the same in every call."""
        if self.pattern == "recorded":
            came_s = [one for one in self.at_s if one is not None]
            says = 0 < len(came_s) == len(self.at_s)
            require(says, "arrivals recorded: only a file of `conserve record` says when")
            yield from came_s
            return
        if self.pattern == "poisson":
            rng = np.random.default_rng(self.seed)
            now_s = 0.0
            while True:
                for interval_s in rng.exponential(1 / self.rate_per_s, _DRAWN_AT_ONCE).tolist():
                    now_s += interval_s
                    yield now_s
        count = 0
        while True:
            yield 0.0 if self.pattern == "together" else count / self.rate_per_s
            count += 1


def choose(items: Sequence[T], seed: int) -> Iterator[T]:
    """Draw endlessly: every item once in random order, then all again in another order, and on."""
    require(len(items) > 0, "there is nothing to choose from; name at least one recording")
    rng = np.random.default_rng(seed)
    while True:
        for index in rng.permutation(len(items)).tolist():
            yield items[index]
