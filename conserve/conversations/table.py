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
    """Asks the policy where what turns append is prefilled, and keeps account of it there.

    Args:
        memory: who is parked; None without pausing.
    """

    def __init__(self, policy: PlacementPolicy, engines: Engines, memory: Memory | None) -> None:
        self._policy = policy
        self._engines = engines
        self._loads = engines.loads
        self._memory = memory

    def prefill(self, history: History, prompt_tokens: int | None, now_s: float) -> str | None:
        """See `ConversationTable.prefill_later_turn`."""
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


# For the process that keeps a table: a conversation's objects lie anywhere in memory, and on pages
# of 4 KB most of the time of finding and freeing them goes into address translation. Python's own
# allocator cannot ask for huge pages, glibc's (2.35 and later) can. It costs 140 bytes each.
MEMORY_ENVIRONMENT = {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


class ConversationTable:
    """Bindings of live conversations to decoders.

    A conversation's life: `bind` (its first turn starts), `prefilled`, `advance` (the turn is
    complete), then `begin` and `advance` for each later turn, and `release`. `abandon` ends a
    turn that did not complete. When a decoder is lost, its conversations stay, unbound, and
    their next turn binds again.

    Turns are told apart by the id that `bind` and `begin` append to ``running``; ending one
    twice, or one of an earlier incarnation, changes nothing.

    Args:
        policy: decides where a conversation goes.
        idle_timeout_s: a conversation not used for so long has ended; see `expire`.
        turn_timeout_s: a turn that runs for longer than this, and the idle time, is taken for
            lost.
        first_id: turns and incarnations are numbered from here, by `STRIDE`. A table that succeeds
            another must start above it.
        pausing: decides which idle histories give up their room; None: none do, as in the ConServe
            paper.
        events: is told what becomes of those.

    Attributes:
        loads: what is known of engines' work; None where the policy does not ask.
        memory: who is paused; None without pausing.
        usage: what each tenant has.
        tools: which run, as clients report it.
        notices: what decoders are told that begin turns by themselves.
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
        """The live conversation of this id, or None."""
        return self._live.by_id.get(history_id)

    def live(self) -> list[History]:
        """All live conversations."""
        return list(self._live.by_id.values())

    @property
    def conversations(self) -> int:
        """How many conversations the live histories are of."""
        return self._live.conversations

    @property
    def reasoning(self) -> int:
        """Return how many histories have a turn that runs."""
        return self._ledger.reasoning

    def active(self, now_s: float) -> int:
        """How many histories are at work: a turn runs, or did within `RECENT_S`."""
        return self._ledger.active(now_s)

    @property
    def expected_cached_tokens(self) -> int:
        """Count the tokens of prompts' beginnings that the account had."""
        return self._turns.expected_cached_tokens

    @property
    def missing_cached_tokens(self) -> int:
        """Count those of them that no engine had."""
        return self._turns.missing_cached_tokens

    @property
    def recomputed_tokens(self) -> int:
        """Count the tokens of paused histories' prompts that a prefiller has computed again."""
        return self._binding.recomputed_tokens

    # --- engines -----------------------------------------------------------------------------

    def add_prefiller(self, prefiller_id: str) -> None:
        """Take in a prefiller that is ready."""
        self._engines.add_prefiller(prefiller_id)

    def add_decoder(
        self, decoder_id: str, capacity_tokens: int, holds: Iterable[History] = ()
    ) -> list[str]:
        """Take in a decoder that is ready, and holds these conversations (after a table was lost).

        Returns:
            Ids among ``holds`` that live elsewhere by now, or have ended: the decoder is to forget
            them.
        """
        return self._membership.add_decoder(decoder_id, capacity_tokens, holds)

    @property
    def accepting_decoders(self) -> list[Decoder]:
        """The decoders to which conversations may be bound."""
        return self._engines.accepting_decoders

    @property
    def accepting_prefillers(self) -> list[Prefiller]:
        """The prefillers to which prompts may be sent."""
        return self._engines.accepting_prefillers

    def engine_joined(
        self, engine_id: str, kind: str, handoffs: Iterable[tuple[int, float]] = ()
    ) -> None:
        """Note of what kind an engine is that was added, if the policy asks for that.

        Args:
            kind: what engines have in common whose work takes the same time.
            handoffs: prompt lengths in tokens, each with the seconds that a handoff took at the
                engine's start.
        """
        if self.loads is not None:
            self.loads.joined(engine_id, kind, tuple(handoffs))

    def engine_says(self, engine_id: str, load: EngineLoad, now_s: float) -> None:
        """Note what an engine says of its work, if the policy asks for that."""
        self._engines.says(engine_id, load, now_s)

    def leave(self, engine_id: str) -> None:
        """Let an engine go: it gets nothing new, and keeps what it has."""
        self._engines.leave(engine_id)

    def is_leaving(self, engine_id: str) -> bool:
        """Whether `leave` was called for this engine."""
        return self._engines.is_leaving(engine_id)

    def evict(self, decoder_id: str) -> list[str]:
        """Unbind a decoder's conversations, each as soon as none of its turns runs.

        Returns:
            Ids of those unbound now: their next turns bind again, as do those of the others.
        """
        return self._membership.evict(decoder_id)

    def remove_prefiller(self, prefiller_id: str) -> None:
        """Remove a prefiller that is lost or has left."""
        self._membership.remove_prefiller(prefiller_id)

    def remove_decoder(self, decoder_id: str) -> list[str]:
        """Remove a decoder that is lost, and unbind what it held.

        Returns:
            Ids of the conversations that lost their KV; their turns are over.
        """
        return self._membership.remove_decoder(decoder_id)

    # --- turns -------------------------------------------------------------------------------

    def recognise(self, chain: Chain, conversation_id: str | None = None) -> str | None:
        """The history that a turn continues, or None: it begins another. See `Families`.

        Args:
            chain: of the turn's messages.
            conversation_id: as the client has stated it, scoped to its tenant.
        """
        return self._live.recognise(chain, conversation_id)

    def histories(self, conversation_id: str) -> list[History]:
        """A conversation's live histories, the oldest first."""
        return self._live.histories(conversation_id)

    def lives(self, history_id: str) -> bool:
        """Whether its conversation has a live history, this one or another."""
        return self._live.lives(history_id)

    def has_several(self, history_id: str) -> bool:
        """Whether its conversation has, or has had, other histories than the first."""
        return self._live.has_several(history_id)

    def bind(
        self,
        history_id: str,
        prompt_tokens: int,
        now_s: float,
        arrived_s: float | None = None,
        opening: Opening | None = None,
    ) -> Placement | None:
        """Start a turn of a history that is new or paused, or whose decoder was lost.

        Args:
            history_id: the history's.
            prompt_tokens: the prompt's length; it counts as held from now on, but for what others
                on that decoder begin with.
            arrived_s: when its first request came, if that was before now.
            opening: what is known of its prompt beside that.

        Returns:
            Where it goes, or None while no decoder has room.

        Raises:
            ValueError: it is bound already; use `begin`.
        """
        return self._binding.bind(history_id, prompt_tokens, now_s, arrived_s, opening)

    def held(self, opening: Opening) -> int:
        """The most of a prompt that any decoder holds already, in tokens."""
        return self._binding.held(opening)

    def take_displaced(self) -> list[History]:
        """The histories that `bind` has ended since, to make room for others of theirs."""
        return self._binding.take_displaced()

    def begin(self, history_id: str, now_s: float, hints: Hints | None = None) -> History | None:
        """Start a turn of a bound conversation; None if it is unknown or unbound.

        Args:
            hints: what its client says beside its messages; they stay until others come.
        """
        return self._turns.begin(history_id, now_s, hints)

    def began(self, turn: TurnKey, decoder_id: str, now_s: float, parks: bool = False) -> bool:
        """Note that a decoder has begun a turn by itself.

        Where the history was paused before the decoder has heard of that, it is bound there again,
        room or not: what runs is not paused.

        Args:
            parks: whether it is to leave its prompt's KV in host memory.

        Returns:
            False, with nothing changed, if the history has ended, or is not there any more.
        """
        return self._turns.began(turn, decoder_id, now_s, parks)

    def to_be_heard(self, chain: Chain, conversation_id: str | None) -> set[str]:
        """The decoders of running turns whose answer a turn may follow, and that may have ended.

        They may have where the turn's messages go on beyond what is known of a history.

        Args:
            chain: of the turn's messages.
            conversation_id: as the client has stated it, scoped to its tenant.
        """
        return self._live.to_be_heard(chain, conversation_id)

    def prefill_later_turn(
        self, history: History, prompt_tokens: int | None = None, now_s: float = 0.0
    ) -> str | None:
        """Return where the turn that a conversation has just begun is prefilled; None: on its
        decoder.

        Args:
            prompt_tokens: the whole prompt's length; None: it is not known. In a prefiller's queue
                the turn counts with what the conversation holds then.
        """
        return self._appends.prefill(history, prompt_tokens, now_s)

    def park(self, history: History) -> bool:
        """Whether the turn that a conversation has just begun leaves its KV in host memory too."""
        return self.memory is not None and self.memory.park(history)

    def prefilled(self, turn: TurnKey, stored_tokens: int = 0) -> None:
        """Note that the remote prefill that a turn waited for is over, done or failed.

        The prefiller's queue is shorter then. A conversation has one such prefill at a time,
        whichever of its turns says so.

        Args:
            stored_tokens: how much of its prompt it has left in host memory.
        """
        self._turns.prefilled(turn, stored_tokens)

    def advance(
        self,
        turn: TurnKey,
        decoder_id: str,
        stats: TurnStats,
        tails: tuple[Digest, ...],
        now_s: float,
    ) -> bool:
        """Complete a turn: its tokens are what the conversation holds now.

        A turn of which this table does not know that it runs counts too, if it is newer than all
        that have ended: it began under a table that was lost.

        Returns:
            False, with nothing changed, if the turn was reported before, or the conversation is
            not on this decoder any more.
        """
        return self._turns.advance(turn, decoder_id, stats, tails, now_s)

    def abandon(
        self,
        turn: TurnKey,
        decoder_id: str | None,
        stats: TurnStats | None,
        now_s: float,
    ) -> History | None:
        """End a turn that did not complete: it was refused, or failed, or its client went away.

        As with `advance`, a turn may have begun under a table that was lost.

        Args:
            decoder_id: who says so; None if it is not a decoder.
            stats: what the engine had done by then, if it got so far.

        Returns:
            The conversation if this ended it: no turn of it is known to have left anything, or
            its client cannot come back to it.
        """
        return self._turns.abandon(turn, decoder_id, stats, now_s)

    def answered(self, turn: TurnKey, at_s: float) -> float | None:
        """Note that a turn's first token came that is not a tool call's.

        Returns:
            The conversation's TTFET, if it was its first such, as far as is known.
        """
        return self._turns.answered(turn, at_s)

    def used_energy(self, history_id: str, incarnation: int, joules: float) -> None:
        """Note that a live conversation has taken so many joules of its engines' energy."""
        history = self._live.current(history_id, incarnation)
        if history is not None:
            history.energy_j += joules

    def release(self, history_id: str) -> History | None:
        """End a conversation; its tokens no longer count. None if it is unknown."""
        return self._ending.release(history_id)

    def expire(self, now_s: float) -> list[History]:
        """End the conversations that were not used for the idle time.

        Returns:
            The conversations that it ended, the longest unused first.
        """
        return self._ending.expire(now_s)

    def holds(self, turn: TurnKey, decoder_id: str) -> bool:
        """Whether the conversation of this turn is live, and is, or was when paused, there."""
        history = self._live.current(turn.history_id, turn.incarnation)
        if history is None:
            return False
        if self.memory is not None and self.memory.paused_on(history.id) == decoder_id:
            return True
        return history.decoder_id == decoder_id
