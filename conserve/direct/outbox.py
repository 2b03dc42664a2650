"""Reports to the table what a decoder does: all turns' ends, and the beginnings of its own ones."""

from typing import NamedTuple

from conserve.history import TurnKey, TurnStats
from conserve.recognition import Digest

# With this many unreported events no turn begins without the table. While the table does not know
# the decoder, this many ends are kept for it.
_MOST_EVENTS = 4096


class Began(NamedTuple):
    """A turn has begun without the table; ``parks``: it leaves its prompt's KV in host memory."""

    turn: TurnKey
    router_id: str
    parks: bool = False


class Ended(NamedTuple):
    """A turn has ended; ``stats`` is None if the engine has done nothing."""

    turn: TurnKey
    stats: TurnStats | None
    tails: tuple[Digest, ...]
    completed: bool


class Report(NamedTuple):
    """Events since the report before, and the number of the last `Notice` obeyed (``heard``)."""

    number: int
    events: tuple[Began | Ended, ...]
    heard: int


class Outbox:
    """A decoder's reports: in order, one at a time, repeated until answered.

    A registration tells all that a decoder holds, including turns that have begun. Ends are
    reported after it all the same: the table may have planned those turns. Told twice, they change
    nothing.

    Attributes:
        registration: number that each report goes with; 0 before the first.
        heard: the number of the last notice that was obeyed.
    """

    def __init__(self) -> None:
        self.registration = 0
        self.heard = 0
        self._is_open = False
        self._number = 0
        self._told = 0
        self._events: list[Began | Ended] = []
        self._under_way: Report | None = None

    @property
    def is_full(self) -> bool:
        return len(self._events) >= _MOST_EVENTS

    def register(self) -> int:
        """Begin a registration, which tells all that the decoder holds, and return its number."""
        self.close()
        self.registration += 1
        self.heard = self._told = self._number = 0
        self._is_open = True
        return self.registration

    def close(self) -> None:
        """Stop reporting to a table that does not know this decoder; keep the ends."""
        unanswered = () if self._under_way is None else self._under_way.events
        events = (*unanswered, *self._events)
        ends: list[Began | Ended] = [one for one in events if isinstance(one, Ended)]
        self._events = ends[-_MOST_EVENTS:]
        self._under_way = None
        self._is_open = False

    def add(self, event: Began | Ended) -> None:
        if self._is_open or (isinstance(event, Ended) and not self.is_full):
            self._events.append(event)

    def obeyed(self, number: int) -> None:
        self.heard = max(self.heard, number)

    def next(self) -> Report | None:
        """Return the unanswered report, else a new one; None if there is nothing to report."""
        if self._under_way is not None or not self._is_open:
            return self._under_way
        if self._events or self.heard > self._told:
            self._number += 1
            self._under_way = Report(self._number, tuple(self._events), self.heard)
            self._events = []
        return self._under_way

    def answered(self, number: int) -> None:
        report = self._under_way
        if report is not None and report.number == number:
            self._told = report.heard
            self._under_way = None
