"""Keeps live histories and engines, and ends histories that are released or were idle."""

from conserve.conversations.engines import Engines
from conserve.conversations.idleness import Idleness
from conserve.conversations.ledger import Ledger
from conserve.direct.desk import first_asked
from conserve.events import EventLog
from conserve.history import History
from conserve.pausing import Memory, Pausing
from conserve.placement import Decoder, EngineLoad, PlacementPolicy, Prefiller
from conserve.recognition import Chain
from conserve.turn import TurnStats


class Parts:
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
                pausing, engines.decoders, self._by_id.get, ledger.pause, events, ledger.tools
            )
        # Histories that were ended for another one's room, until the table's owner has heard.
        self._displaced: list[History] = []
        # Of a predecessor: where its histories were bound, until they are again, and those of which
        # turns run.
        self._homes: dict[str, str] = {}
        self._running: dict[str, list[History]] = {}

    # --- histories that live -----------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, history_id: str) -> bool:
        return history_id in self._by_id

    def live(self) -> list[History]:
        return list(self._by_id.values())

    def get(self, history_id: str) -> History | None:
        return self._by_id.get(history_id)

    def histories(self, conversation_id: str) -> list[History]:
        return self._live.histories(conversation_id)

    def has_several(self, history_id: str) -> bool:
        """Return whether a history's conversation has others."""
        return self._live.has_several(history_id)

    def recognise(self, chain: Chain, conversation_id: str | None = None) -> str | None:
        """Return the history that a turn continues; see `LiveHistories.recognise`."""
        return self._live.recognise(chain, conversation_id)

    def to_be_heard(self, chain: Chain, conversation_id: str | None) -> set[str]:
        return self._live.to_be_heard(chain, conversation_id)

    def rooted(self, chain: Chain) -> Chain:
        return self._kinship.families.rooted(chain)

    def record(self, turn_id: int) -> TurnStats | None:
        """Return the record of a turn that runs."""
        return self._ledger.records.get(turn_id)

    @property
    def conversations(self) -> int:
        return self._live.conversations

    @property
    def reasoning(self) -> int:
        return self._ledger.reasoning

    def active(self, now_s: float) -> int:
        """Return how many histories are active: a turn runs, or did a moment ago."""
        return self._ledger.active(now_s)

    # --- engines -----------------------------------------------------------------------------

    @property
    def accepting_decoders(self) -> list[Decoder]:
        return self._engines.accepting_decoders

    @property
    def accepting_prefillers(self) -> list[Prefiller]:
        return self._engines.accepting_prefillers

    def add_prefiller(self, prefiller_id: str) -> None:
        self._engines.add_prefiller(prefiller_id)

    def engine_says(self, engine_id: str, load: EngineLoad, now_s: float) -> None:
        self._engines.says(engine_id, load, now_s)

    def leave(self, engine_id: str) -> None:
        """Give an engine nothing new; it keeps what it has."""
        self._engines.leave(engine_id)

    def is_leaving(self, engine_id: str) -> bool:
        return self._engines.is_leaving(engine_id)

    # --- histories end -----------------------------------------------------------------------

    def end_when_idle_for(self, idle_timeout_s: float) -> None:
        """End histories after another idle time than before."""
        self._idleness.change(idle_timeout_s)

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
