"""Tells the table what a decoder does: every turn's end, and the begin of its own ones."""

from typing import NamedTuple

from conserve.history import TurnKey, TurnStats
from conserve.recognition import Digest

# Where the table is so far behind, no turn is begun without asking it; while it does not know the
# decoder, so many ends are kept for it.
_MOST_EVENTS = 4096


class Began(NamedTuple):
    """A turn has begun that the table has not been asked for.

    Attributes:
        router_id: which router has sent it.
        parks: whether it leaves its prompt's KV in host memory.
    """

    turn: TurnKey
    router_id: str
    parks: bool = False


class Ended(NamedTuple):
    """A turn has ended, asked for or not.

    Attributes:
        stats: what the engine has done; None: nothing.
        tails: of its answer's choices.
    """

    turn: TurnKey
    stats: TurnStats | None
    tails: tuple[Digest, ...]
    completed: bool


class Report(NamedTuple):
    """Tells what has happened since the report before.

    Attributes:
        number: one more than that one's.
        events: in order.
        heard: the number of the last `Notice` that was obeyed before this was made.
    """

    number: int
    events: tuple[Began | Ended, ...]
    heard: int


class Outbox:
    """A decoder's reports: in order, one at a time, again where the answer is missing.

    A registration tells all that a decoder holds, whose turns have begun included. Ends are told
    after it all the same: the table may have planned those turns. Told twice, they change nothing.

    Attributes:
        registration: its number, which each report goes with; 0 before the first.
        heard: the number of the last notice that was obeyed.

    Example:
        >>> outbox = Outbox()
        >>> outbox.register(), outbox.next()
        (1, None)
        >>> outbox.add(Began(TurnKey("c", 1, 257), "router"))
        >>> outbox.next().number, outbox.next().number  # Until it is answered.
        (1, 1)
        >>> outbox.answered(1)
        >>> outbox.next()
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
        """Whether the table is far behind."""
        return len(self._events) >= _MOST_EVENTS

    def register(self) -> int:
        """All that the decoder holds is about to be told; returns the registration's number."""
        self.close()
        self.registration += 1
        self.heard = self._told = self._number = 0
        self._is_open = True
        return self.registration

    def close(self) -> None:
        """The table does not know this decoder, which tells all of it as it registers again."""
        unanswered = () if self._under_way is None else self._under_way.events
        events = (*unanswered, *self._events)
        ends: list[Began | Ended] = [one for one in events if isinstance(one, Ended)]
        self._events = ends[-_MOST_EVENTS:]
        self._under_way = None
        self._is_open = False

    def add(self, event: Began | Ended) -> None:
        """This has happened."""
        if self._is_open or (isinstance(event, Ended) and not self.is_full):
            self._events.append(event)

    def obeyed(self, number: int) -> None:
        """Note that what the notices up to this number say is done."""
        self.heard = max(self.heard, number)

    def next(self) -> Report | None:
        """Return the report that is not answered yet, else a new one; None: there is nothing to
        tell.
        """
        if self._under_way is not None or not self._is_open:
            return self._under_way
        if self._events or self.heard > self._told:
            self._number += 1
            self._under_way = Report(self._number, tuple(self._events), self.heard)
            self._events = []
        return self._under_way

    def answered(self, number: int) -> None:
        """The table has this report."""
        report = self._under_way
        if report is not None and report.number == number:
            self._told = report.heard
            self._under_way = None
