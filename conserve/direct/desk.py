"""Decides which turns a decoder may begin without asking the table, and numbers them."""

from typing import NamedTuple

from conserve.direct.notices import Notice
from conserve.direct.numbering import next_direct
from conserve.direct.outbox import Began, Outbox
from conserve.history import TurnKey
from conserve.holdings import Holdings
from conserve.recognition import Digest

LEASE_S = 5.0
"""How long after it asked for notices a decoder may begin turns by itself.

Shorter than the silence after which it counts as lost (15 s), and than a new table's wait for
decoders to register (8 s): a decoder that the table does not know begins nothing.
"""


class Continued(NamedTuple):
    """The history that a turn continues: by its messages, or a completion by its conversation's id.

    Attributes:
        root: digest of the first prompt; empty of a completion, as is ``end``.
        end: digest of all up to the newest answer.
        conversation_id: scoped to the tenant; None if its client states none.
    """

    root: Digest
    end: Digest
    conversation_id: str | None


class Desk:
    """Accepts turns that come straight to a decoder, if each is plainly the next of its history.

    It continues the newest answer of a history that this decoder holds, no turn of which runs, and
    which the table has not taken back. Anything else is the table's to decide, and so are histories
    idle for half of ``idle_timeout_s``: the table may be about to end them.

    Attributes:
        parks: whether a turn that begins now leaves its prompt's KV in host memory.
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

    def begin(self, asked: Continued, router_id: str, now_s: float) -> TurnKey | None:
        """Begin a turn; None means that its router has to ask the table."""
        if self._closed or now_s >= self._until_s or self.outbox.is_full:
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
