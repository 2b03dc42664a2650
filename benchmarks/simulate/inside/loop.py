"""Runs what happens when, in virtual time."""

import math
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Any


class Loop:
    """Events in the order of their times, and of equal ones as they were put in."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = count()

    def at(self, at_s: float, do: Callable[..., None], *arguments: Any) -> None:
        heappush(self._events, (at_s, next(self._numbers), do, arguments))

    @property
    def next_s(self) -> float:
        """When the next event is; infinite: never."""
        return self._events[0][0] if self._events else math.inf

    def run(self) -> None:
        while self._events:
            self.now_s, _, do, arguments = heappop(self._events)
            do(*arguments)
