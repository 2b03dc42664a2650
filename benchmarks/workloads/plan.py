"""The seat of every workload: conversations in the order of their arrival."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from benchmarks.records import Script

Arriving = tuple[float, Script]
"""Arrival in seconds from the run's start, and the conversation that arrives."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Conversations, in ascending order of arrival. Each iteration starts them all anew.

    Attributes:
        name: names the kind of workload.
        counts: what it comprises, and what was left out or assumed on the way, for the report.
        make: makes the conversations one by one, as they are asked for.
    """

    name: str
    counts: Mapping[str, int]
    make: Callable[[], Iterator[Arriving]]

    def __iter__(self) -> Iterator[Arriving]:
        return self.make()
