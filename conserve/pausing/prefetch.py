"""Follows histories that are brought back to their decoders before their turns come."""

from collections import Counter
from dataclasses import dataclass
from heapq import heappop, heappush

OUTCOMES = ("used", "late", "dropped")
# How long before its turn a history may be brought back: a load, and two looks at what is due.
_LEAD_S = 3.0
# A turn that has not come by then, after it was due, was a wrong guess.
_WAITS_S = 5.0
# As many turns are expected at a time; later ones are not noted.
_MOST_EXPECTED = 65_536


@dataclass(slots=True)
class _Prefetch:
    """A history that is brought back; ``there_s``: since when it is there, None while it loads."""

    decoder_id: str
    until_s: float
    there_s: float | None = None


class Prefetches:
    """Histories whose turns are announced, and those brought back for such a turn.

    Attributes:
        outcomes: counts: ``used`` (the turn found its KV on the decoder), ``late`` (it came while
            that was loaded) and ``dropped`` (it did not come in time, or the room was needed).
    """

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self._open: dict[str, _Prefetch] = {}
        # When turns are due, by their clients. Of some, the turn has come since.
        self._expected: list[tuple[float, str]] = []

    def expect(self, history_id: str, due_s: float) -> None:
        """Note when a client expects to send a history's next turn."""
        if len(self._expected) < _MOST_EXPECTED:
            heappush(self._expected, (due_s, history_id))

    def due(self, now_s: float) -> list[tuple[str, float]]:
        """Return the histories whose turns are due soon, and when, once each."""
        due = []
        while self._expected and self._expected[0][0] <= now_s + _LEAD_S:
            due_s, history_id = heappop(self._expected)
            due.append((history_id, due_s))
        return due

    def loads_on(self, decoder_id: str) -> bool:
        return (decoder_id, None) in ((one.decoder_id, one.there_s) for one in self._open.values())

    def begin(self, history_id: str, decoder_id: str, due_s: float) -> None:
        self._open[history_id] = _Prefetch(decoder_id, due_s + _WAITS_S)

    def loaded(self, history_id: str, now_s: float) -> bool:
        """Note that a history is there; False if it was given up, or its turn has come."""
        if (one := self._open.get(history_id)) is None:
            return False
        one.there_s = now_s
        return True

    def turn_came(self, history_id: str, now_s: float) -> float | None:
        """Return for how long the history has been there; None if it was not brought back."""
        if (one := self._open.pop(history_id, None)) is None:
            return None
        self.outcomes["late" if one.there_s is None else "used"] += 1
        return None if one.there_s is None else max(0.0, now_s - one.there_s)

    def drop(self, history_id: str) -> None:
        if self._open.pop(history_id, None) is not None:
            self.outcomes["dropped"] += 1

    def drop_on(self, decoder_id: str) -> None:
        for history_id in [id for id, one in self._open.items() if one.decoder_id == decoder_id]:
            self.drop(history_id)

    def overdue(self, now_s: float) -> list[str]:
        return [history_id for history_id, one in self._open.items() if one.until_s < now_s]
