"""Keeps live histories and engines, and ends histories that are released or were idle."""

from conserve.conversations.engines import Engines
from conserve.conversations.idleness import Idleness
from conserve.conversations.ledger import Ledger
from conserve.direct.desk import first_asked
from conserve.events import EventLog
from conserve.history import History
from conserve.pausing import Memory, Pausing
from conserve.placement import PlacementPolicy


class State:
    """All that a conversation table keeps; `Turns`, `Binding` and `ConversationTable` act on it.

    Args:
        turn_timeout_s: a turn that runs for longer than this, and the idle time, counts as lost.
        first_id: turns and incarnations are numbered from here. A table that succeeds another must
            start above it.
        pausing: None pauses no histories, as in the ConServe paper.
    """

    def __init__(
        self,
        policy: PlacementPolicy,
        idle_timeout_s: float,
        turn_timeout_s: float = 0.0,
        first_id: int = 1,
        pausing: Pausing | None = None,
        events: EventLog | None = None,
    ) -> None:
        self.policy, self.loads = policy, policy.loads
        self._engines = engines = Engines(self.loads)
        self.decoders, self.prefillers = engines.decoders, engines.prefillers
        self._ledger = ledger = Ledger(engines)
        self.usage, self.tools, self.notices = ledger.usage, ledger.tools, ledger.notices
        self._live, self._by_id = ledger.live, ledger.live.by_id
        self._kinship = ledger.live.kinship
        self._next_id = self.first_id = first_asked(first_id)
        self._idleness = Idleness(idle_timeout_s, turn_timeout_s, self._by_id)
        self.memory: Memory | None = None
        if pausing is not None:
            self.memory = Memory(
                pausing, engines.decoders, self._by_id.get, ledger.unbind, events, ledger.tools
            )
        # Histories that were ended for another one's room, until the table's owner has heard.
        self._displaced: list[History] = []
        # Of a predecessor: where its histories were bound, until they are again, and those of which
        # turns run.
        self._homes: dict[str, str] = {}
        self._running: dict[str, list[History]] = {}
        # Calls for the table's owner.
        live, by_id = self._live, self._by_id
        self.get, self.histories, self.has_several = by_id.get, live.histories, live.has_several
        self.recognise, self.to_be_heard = live.recognise, live.to_be_heard
        self.rooted = self._kinship.families.rooted
        self.active, self.records = ledger.active, ledger.records
        self.add_prefiller, self.engine_says = engines.add_prefiller, engines.says
        self.leave, self.is_leaving = engines.leave, engines.is_leaving
        self.end_when_idle_for = self._idleness.change

    def release(self, history_id: str) -> History | None:
        """End a history, whose tokens no longer count; None if it is unknown."""
        history = self._ledger.take_out(history_id)
        if history is not None:
            self._ledger.give_up(history, ended=True)
            if self.memory is not None:
                self.memory.ended(history)
        return history

    def expire(self, now_s: float) -> list[History]:
        """End the histories not used for the idle time, the longest unused first."""
        ended = self._idleness.ended(now_s)
        for history in ended:
            if self.memory is not None and not history.running:
                self.memory.expired(history, now_s)
            self.release(history.id)
        ended.sort(key=lambda one: one.last_used_s)
        return ended
