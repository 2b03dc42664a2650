"""A decoder's side: the turns that it begins without asking the table, and its reports."""

from typing import NamedTuple

from conserve.direct.homes import LARGE_TOKENS
from conserve.direct.notices import Notice
from conserve.holdings import Holdings
from conserve.recognition import Digest
from conserve.turn import TurnKey, TurnStats

STRIDE = 256
"""The table numbers turns by multiples of this; numbers between them are the decoder's."""


def first_asked(above: int) -> int:
    return -(-above // STRIDE) * STRIDE


def next_direct(last: int) -> int | None:
    """Return a decoder's next number for a history's turn; None if they are used up.

    A history gets a number of the table's whenever it comes to a decoder, so numbers are unique.
    """
    return last + 1 if (last + 1) % STRIDE else None


def is_direct(turn_id: int) -> bool:
    return turn_id % STRIDE != 0


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

    A registration tells all that a decoder holds. Ends are reported after it all the same: the
    table may have planned those turns. A report that comes twice changes nothing.
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


LEASE_S = 5.0
"""How long after it asked for notices a decoder may begin turns by itself.

Shorter than the silence after which it counts as lost (15 s), and than a new table's wait for
decoders to register (8 s): a decoder that the table does not know begins nothing.
"""


class Continued(NamedTuple):
    """The history that a turn continues: by its messages, or a completion by its conversation's id.

    ``root`` and ``end`` digest the first prompt, and all up to the newest answer; empty of
    completions.
    """

    root: Digest
    end: Digest
    conversation_id: str | None


class Desk:
    """Accepts turns that come straight to a decoder, if each is plainly the next of its history.

    It continues the newest answer of a history that this decoder holds, no turn of which runs, and
    which the table has not taken back. Histories idle for half of ``idle_timeout_s`` are the
    table's, which may be about to end them.
    """

    def __init__(self, holdings: Holdings, idle_timeout_s: float) -> None:
        self._holdings = holdings
        self._longest_idle_s = idle_timeout_s / 2
        self._until_s = float("-inf")
        self._closed = False
        self.outbox = Outbox()
        self.parks = False

    def hear(self, notice: Notice, asked_s: float) -> None:
        """Obey a notice, which was asked for at ``asked_s``."""
        for history_id, incarnation in notice.given_up:
            self._holdings.give_up(history_id, incarnation)
        for history_id, incarnation in notice.ended:
            self._holdings.drop(history_id, incarnation)
        self.parks = notice.parks
        self.outbox.obeyed(notice.number)
        self._until_s = max(self._until_s, asked_s + LEASE_S)

    def stop(self) -> None:
        """Begin nothing until the table is heard of again: it does not know this decoder."""
        self._until_s = float("-inf")
        self.outbox.close()

    def close(self) -> None:
        self._closed = True

    def begin(
        self, asked: Continued, router_id: str, now_s: float, waiting_tokens: int = 0
    ) -> TurnKey | None:
        """Begin a turn; None means that its router has to ask the table.

        With host memory, any decoder can continue a history: then turns that would wait here for
        ``waiting_tokens`` of others' prompts are the table's to place.
        """
        if self._closed or now_s >= self._until_s or self.outbox.is_full:
            return None
        if self.parks and waiting_tokens >= LARGE_TOKENS:
            return None
        held = self._holdings.continued(asked.root, asked.end, asked.conversation_id)
        if held is None or now_s - held.last_used_s >= self._longest_idle_s:
            return None
        # No turn of this history runs.
        number = next_direct(held.finished)
        if number is None:
            return None
        turn = TurnKey(held.id, held.incarnation, number)
        self._holdings.begin(turn)
        self.outbox.add(Began(turn, router_id, self.parks))
        return turn
