"""The table of live conversations, as others see it."""

from collections.abc import Iterable

from conserve.conversations.binding import Binding
from conserve.conversations.ending import Ending
from conserve.conversations.engines import Engines
from conserve.conversations.ledger import Ledger
from conserve.conversations.membership import Membership
from conserve.conversations.turns import Turns
from conserve.events import EventLog
from conserve.hints import Hints
from conserve.histories.kinship import Opening
from conserve.history import History, TurnKey, TurnStats
from conserve.idleness import Idleness
from conserve.pausing import Memory, Pausing
from conserve.placement import (
    Appended,
    Decoder,
    ElasticPlacement,
    EngineLoad,
    Loads,
    Placement,
    PlacementPolicy,
    Prefiller,
)
from conserve.recognition import Chain, Digest


class Appends:
    """Asks the policy where what turns append is prefilled, and keeps account of it."""

    def __init__(self, policy: PlacementPolicy, engines: Engines, memory: Memory | None) -> None:
        self._policy = policy
        self._engines = engines
        self._loads = engines.loads
        self._memory = memory

    def prefill(self, history: History, prompt_tokens: int | None, now_s: float) -> str | None:
        """Return the prefiller of the turn that has just begun; None means its decoder.

        Args:
            prompt_tokens: the whole prompt's length; None if it is not known. The queue then counts
                what the history holds.
        """
        appended = None
        if prompt_tokens is not None and history.decoder_id is not None:
            appended = Appended(
                history.decoder_id,
                prompt_tokens,
                min(history.held_tokens, prompt_tokens - 1),
                0 if self._memory is None else self._memory.parked_of(history),
            )
        pool = self._engines.accepting_prefillers
        prefiller_id = self._policy.prefill_later_turn(pool, appended, now_s)
        queued_tokens = history.held_tokens
        if appended is not None:
            cached_tokens = appended.held_tokens
            if prefiller_id is not None:
                cached_tokens = min(appended.parked_tokens, cached_tokens)
            queued_tokens = appended.tokens - cached_tokens
            if self._loads is not None:
                self._loads.appended(
                    history.id,
                    queued_tokens,
                    cached_tokens,
                    prefiller_id or appended.decoder_id,
                    now_s,
                    lent=prefiller_id is not None,
                )
        if prefiller_id is not None:
            self._engines.leave_queue(history)
            self._engines.join_queue(history, prefiller_id, queued_tokens)
        return prefiller_id


# For the process that keeps a table: finding and freeing conversations' scattered objects on pages
# of 4 KB takes mostly address translation. Python's own allocator cannot ask for huge pages,
# glibc's (2.35 and later) can. It costs 140 bytes a conversation.
MEMORY_ENVIRONMENT = {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


class ConversationTable:
    """Bindings of live conversations to decoders.

    A conversation's life: `bind` (its first turn starts), `prefilled`, `advance` (the turn is
    complete), then `begin` and `advance` for each later turn, and `release`. `abandon` ends a turn
    that did not complete. When a decoder is lost, its histories stay, unbound, and their next turns
    bind again. Ending a turn twice, or one of an earlier incarnation, changes nothing.

    Args:
        idle_timeout_s: a history not used for so long has ended; see `expire`.
        turn_timeout_s: a turn that runs for longer than this, and the idle time, counts as lost.
        first_id: turns and incarnations are numbered from here, by `STRIDE`. A table that succeeds
            another must start above it.
        pausing: chooses the idle histories that are paused; None pauses none, as in the ConServe
            paper.

    Attributes:
        loads: what is known of engines' work; None if the policy does not ask.
        tools: those that run, as clients report it.
        notices: for decoders that begin turns by themselves.
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
        loads = policy.loads if isinstance(policy, ElasticPlacement) else None
        self._engines = engines = Engines(loads)
        self._ledger = ledger = Ledger(engines)
        self._live = ledger.live
        self.loads: Loads | None = loads
        self.decoders, self.prefillers = engines.decoders, engines.prefillers
        self.usage, self.tools, self.notices = ledger.usage, ledger.tools, ledger.notices
        by_id = ledger.live.by_id
        idleness = Idleness(idle_timeout_s, turn_timeout_s, by_id)
        self.memory: Memory | None = None
        if pausing is not None:
            self.memory = Memory(
                pausing, engines.decoders, by_id.get, ledger.unbind, events, ledger.tools
            )
        self._ending = Ending(ledger, idleness, self.memory)
        self._turns = Turns(ledger, engines, self._ending, self.memory, first_id)
        self._binding = Binding(
            policy, ledger, engines, self._turns, self._ending, idleness, self.memory
        )
        self._appends = Appends(policy, engines, self.memory)
        self._membership = Membership(ledger, engines, self._turns, idleness, self.memory)

    def __len__(self) -> int:
        return len(self._live.by_id)

    def __contains__(self, history_id: str) -> bool:
        return history_id in self._live.by_id

    def get(self, history_id: str) -> History | None:
        return self._live.by_id.get(history_id)

    def live(self) -> list[History]:
        return list(self._live.by_id.values())

    @property
    def conversations(self) -> int:
        return self._live.conversations

    @property
    def reasoning(self) -> int:
        """Return how many histories have a running turn."""
        return self._ledger.reasoning

    def active(self, now_s: float) -> int:
        return self._ledger.active(now_s)

    @property
    def expected_cached_tokens(self) -> int:
        """Return the tokens of prompts' beginnings that should have been cached."""
        return self._turns.expected_cached_tokens

    @property
    def missing_cached_tokens(self) -> int:
        """Return those of them that no engine had."""
        return self._turns.missing_cached_tokens

    @property
    def recomputed_tokens(self) -> int:
        """Return the tokens of paused histories' prompts that prefillers have computed again."""
        return self._binding.recomputed_tokens

    def add_prefiller(self, prefiller_id: str) -> None:
        self._engines.add_prefiller(prefiller_id)

    def add_decoder(
        self, decoder_id: str, capacity_tokens: int, holds: Iterable[History] = ()
    ) -> list[str]:
        return self._membership.add_decoder(decoder_id, capacity_tokens, holds)

    @property
    def accepting_decoders(self) -> list[Decoder]:
        return self._engines.accepting_decoders

    @property
    def accepting_prefillers(self) -> list[Prefiller]:
        return self._engines.accepting_prefillers

    def engine_joined(
        self, engine_id: str, kind: str, handoffs: Iterable[tuple[int, float]] = ()
    ) -> None:
        """Note the kind of an engine that was added, if the policy asks for that.

        Args:
            kind: equal for engines whose work takes the same time.
            handoffs: prompt lengths in tokens, each with the seconds that a handoff took at its
                start.
        """
        if self.loads is not None:
            self.loads.joined(engine_id, kind, tuple(handoffs))

    def engine_says(self, engine_id: str, load: EngineLoad, now_s: float) -> None:
        self._engines.says(engine_id, load, now_s)

    def leave(self, engine_id: str) -> None:
        self._engines.leave(engine_id)

    def is_leaving(self, engine_id: str) -> bool:
        return self._engines.is_leaving(engine_id)

    def evict(self, decoder_id: str) -> list[str]:
        return self._membership.evict(decoder_id)

    def remove_prefiller(self, prefiller_id: str) -> None:
        self._membership.remove_prefiller(prefiller_id)

    def remove_decoder(self, decoder_id: str) -> list[str]:
        return self._membership.remove_decoder(decoder_id)

    def recognise(self, chain: Chain, conversation_id: str | None = None) -> str | None:
        return self._live.recognise(chain, conversation_id)

    def histories(self, conversation_id: str) -> list[History]:
        return self._live.histories(conversation_id)

    def lives(self, history_id: str) -> bool:
        return self._live.lives(history_id)

    def has_several(self, history_id: str) -> bool:
        return self._live.has_several(history_id)

    def bind(
        self,
        history_id: str,
        prompt_tokens: int,
        now_s: float,
        arrived_s: float | None = None,
        opening: Opening | None = None,
    ) -> Placement | None:
        return self._binding.bind(history_id, prompt_tokens, now_s, arrived_s, opening)

    def held(self, opening: Opening) -> int:
        return self._binding.held(opening)

    def take_displaced(self) -> list[History]:
        return self._binding.take_displaced()

    def begin(self, history_id: str, now_s: float, hints: Hints | None = None) -> History | None:
        return self._turns.begin(history_id, now_s, hints)

    def began(self, turn: TurnKey, decoder_id: str, now_s: float, parks: bool = False) -> bool:
        return self._turns.began(turn, decoder_id, now_s, parks)

    def to_be_heard(self, chain: Chain, conversation_id: str | None) -> set[str]:
        return self._live.to_be_heard(chain, conversation_id)

    def prefill_later_turn(
        self, history: History, prompt_tokens: int | None = None, now_s: float = 0.0
    ) -> str | None:
        return self._appends.prefill(history, prompt_tokens, now_s)

    def park(self, history: History) -> bool:
        """Return whether the turn that has just begun leaves its KV in host memory too."""
        return self.memory is not None and self.memory.park(history)

    def prefilled(self, turn: TurnKey, stored_tokens: int = 0) -> None:
        self._turns.prefilled(turn, stored_tokens)

    def advance(
        self,
        turn: TurnKey,
        decoder_id: str,
        stats: TurnStats,
        tails: tuple[Digest, ...],
        now_s: float,
    ) -> bool:
        return self._turns.advance(turn, decoder_id, stats, tails, now_s)

    def abandon(
        self,
        turn: TurnKey,
        decoder_id: str | None,
        stats: TurnStats | None,
        now_s: float,
    ) -> History | None:
        return self._turns.abandon(turn, decoder_id, stats, now_s)

    def answered(self, turn: TurnKey, at_s: float) -> float | None:
        return self._turns.answered(turn, at_s)

    def used_energy(self, history_id: str, incarnation: int, joules: float) -> None:
        """Add to the energy that engines have taken for a live history."""
        history = self._live.current(history_id, incarnation)
        if history is not None:
            history.energy_j += joules

    def release(self, history_id: str) -> History | None:
        return self._ending.release(history_id)

    def expire(self, now_s: float) -> list[History]:
        return self._ending.expire(now_s)

    def holds(self, turn: TurnKey, decoder_id: str) -> bool:
        """Return whether a turn's history is live, and is on this decoder, or was when it was
        paused.
        """
        history = self._live.current(turn.history_id, turn.incarnation)
        if history is None:
            return False
        if self.memory is not None and self.memory.paused_on(history.id) == decoder_id:
            return True
        return history.decoder_id == decoder_id
