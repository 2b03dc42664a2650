"""A decoder's end: which turns it may begin without the table, and how they are called."""

from typing import NamedTuple

from conserve.direct.notices import Notice
from conserve.direct.numbering import next_direct
from conserve.direct.outbox import Began, Outbox
from conserve.history import TurnKey
from conserve.holdings import Holdings
from conserve.recognition import Digest

LEASE_S = 5.0
"""For so long after it has asked for notices a decoder may begin turns by itself.

It is shorter than the silence after which it is taken for lost (15 s), and than the time that a
table which succeeds another waits for decoders to register (8 s): whoever is unknown to the table
begins nothing.
"""


class Continued(NamedTuple):
    """Names what a turn goes on with: by its messages, or, of a completion, by its conversation's
    id.

    Attributes:
        root: digest of the first prompt; empty of a completion, as is ``end``.
        end: digest of all up to its newest answer.
        conversation_id: as its client states it, scoped to the tenant; None: it does not.
    """

    root: Digest
    end: Digest
    conversation_id: str | None


class Desk:
    """Takes turns that come straight to a decoder, where they are plainly the next one.

    That is: the turn goes on from the newest answer of a history that this decoder holds (or is a
    completion, and this decoder holds those of its conversation), of which no turn runs, and which
    the table has not asked back. Whatever is not so plain (a first turn, a retry, an edit, a
    branch, two at a time) is the table's to decide, and so is what has been idle for half the time
    after which it ends: the table may be about to end it.

    Args:
        holdings: what the decoder holds.
        idle_timeout_s: a history not used for so long has ended.

    Attributes:
        outbox: what the table is to be told.
        parks: whether a turn that begins now leaves its prompt's KV in host memory.

    Example:
        >>> from conserve.history import TurnStats
        >>> holdings, turn = Holdings(), TurnKey("c", 1, 256)
        >>> desk = Desk(holdings, idle_timeout_s=60)
        >>> holdings.begin(turn, root=b"root")
        >>> holdings.finish(turn, TurnStats(9, 1, 0, 0), (b"answered",), completed=True)
        >>> now_s = holdings.all()[0].last_used_s
        >>> asked = Continued(b"root", b"answered", "c")
        >>> desk.begin(asked, "router", now_s)  # Not before the table is heard of.
        >>> _ = desk.outbox.register()
        >>> desk.hear(Notice(1), asked_s=now_s)
        >>> desk.begin(asked, "router", now_s)
        TurnKey(history_id='c', incarnation=1, turn_id=257)
        >>> desk.begin(asked, "router", now_s)  # One runs.
    """

    def __init__(self, holdings: Holdings, idle_timeout_s: float) -> None:
        self._holdings = holdings
        self._longest_idle_s = idle_timeout_s / 2
        self._until_s = float("-inf")
        self._closed = False
        self.outbox = Outbox()
        self.parks = False

    def hear(self, notice: Notice, asked_s: float) -> None:
        """Obey a notice of the table.

        Args:
            asked_s: when it was asked for.
        """
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
        """Begin nothing any more: the engine leaves, or ends."""
        self._closed = True

    def begin(self, asked: Continued, router_id: str, now_s: float) -> TurnKey | None:
        """Begin a turn; None: its router has to ask the table.

        Args:
            router_id: who has sent it.
        """
        if self._closed or now_s >= self._until_s or self.outbox.is_full:
            return None
        held = self._holdings.continued(asked.root, asked.end, asked.conversation_id)
        if held is None or now_s - held.last_used_s >= self._longest_idle_s:
            return None
        # No turn of it runs.
        number = next_direct(held.finished)
        if number is None:
            return None
        turn = TurnKey(held.id, held.incarnation, number)
        self._holdings.begin(turn)
        self.outbox.add(Began(turn, router_id, self.parks))
        return turn
