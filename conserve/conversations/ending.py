"""Ends histories that are released, or were not used for too long."""

from conserve.conversations.ledger import Ledger
from conserve.history import History
from conserve.idleness import Idleness
from conserve.pausing import Memory


class Ending:
    def __init__(self, ledger: Ledger, idleness: Idleness, memory: Memory | None) -> None:
        self._ledger = ledger
        self._idleness = idleness
        self._memory = memory

    def release(self, history_id: str) -> History | None:
        """End a history, whose tokens no longer count; None if it is unknown."""
        history = self._ledger.take_out(history_id)
        if history is not None:
            self._ledger.give_up(history, ended=True)
            if self._memory is not None:
                self._memory.ended(history)
        return history

    def expire(self, now_s: float) -> list[History]:
        """End the histories not used for the idle time, the longest unused first."""
        ended = self._idleness.ended(now_s)
        for history in ended:
            if self._memory is not None and not history.running:
                self._memory.expired(history, now_s)
            self.release(history.id)
        ended.sort(key=lambda one: one.last_used_s)
        return ended
