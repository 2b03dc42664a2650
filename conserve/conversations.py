"""Live conversations: which decoder each is bound to, and what each decoder holds.

The one authority for bindings, as plain data structures: no Ray, no clock (time is an
argument), and whatever happens once a turn is O(1) in the number of conversations, but where room
has to be made (`conserve.pausing`). Occupancy is exact by construction: a decoder's
``held_tokens`` is changed in `ConversationTable._charge` alone. What each tenant has is counted at
the same place.
"""

from collections.abc import Iterable
from itertools import islice
from sys import intern

from conserve import identity
from conserve.activity import Activity
from conserve.conversation import Conversation, TurnKey, TurnStats
from conserve.direct.notices import Notices
from conserve.direct.numbering import STRIDE, first_asked
from conserve.events import EventLog
from conserve.hints import Hints
from conserve.histories.families import scope_for, scope_of
from conserve.histories.groups import Groups
from conserve.histories.kinship import Kinship, Opening
from conserve.histories.points import Points, mark
from conserve.histories.sharing import held_alone
from conserve.idleness import Idleness
from conserve.pausing import Memory, Pausing, RunningTools
from conserve.placement import (
    NOTHING_SHARED,
    Appended,
    Decoder,
    ElasticPlacement,
    EngineLoad,
    Loads,
    Placement,
    PlacementPolicy,
    Prefiller,
    Shared,
)
from conserve.recognition import Chain, Digest
from conserve.tenants.usage import TenantUsage, UsageBook

# For the process that keeps a table: a conversation's objects lie anywhere in memory, and on pages
# of 4 KB most of the time of finding and freeing them goes into address translation. Python's own
# allocator cannot ask for huge pages, glibc's (2.35 and later) can. It costs 140 bytes each.
MEMORY_ENVIRONMENT = {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}

# Of the histories of one first prompt, so many are looked at, the newest.
_LOOKED_AT = 32


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
        self._policy = policy
        self.loads: Loads | None = policy.loads if isinstance(policy, ElasticPlacement) else None
        self._first_id = self._next_id = first_asked(first_id)
        self._conversations: dict[str, Conversation] = {}
        self._idleness = Idleness(idle_timeout_s, turn_timeout_s, self._conversations)
        self._groups = Groups()
        self._kinship = Kinship(self._conversations.get, self._charge)
        self._families = self._kinship.families
        self.decoders: dict[str, Decoder] = {}
        self.prefillers: dict[str, Prefiller] = {}
        self._leaving: set[str] = set()
        self._evicting: set[str] = set()
        self._displaced: list[Conversation] = []
        self.reasoning = 0
        self._activity = Activity()
        # Of prompts, what the account had of their beginnings, and what of it no engine had.
        self.expected_cached_tokens = 0
        self.missing_cached_tokens = 0
        # Of prompts of paused histories, what had been computed before, and a prefiller computes
        # again.
        self.recomputed_tokens = 0
        self.usage = UsageBook()
        self.tools = RunningTools()
        self.notices = Notices()
        self.memory: Memory | None = None
        if pausing is not None:
            get = self._conversations.get
            self.memory = Memory(pausing, self.decoders, get, self._unbind, events, self.tools)

    def __len__(self) -> int:
        return len(self._conversations)

    def __contains__(self, conversation_id: str) -> bool:
        return conversation_id in self._conversations

    def get(self, conversation_id: str) -> Conversation | None:
        """The live conversation of this id, or None."""
        return self._conversations.get(conversation_id)

    def live(self) -> list[Conversation]:
        """All live conversations."""
        return list(self._conversations.values())

    # --- engines -----------------------------------------------------------------------------

    def add_prefiller(self, prefiller_id: str) -> None:
        """Take in a prefiller that is ready."""
        self.prefillers.setdefault(prefiller_id, Prefiller(prefiller_id))

    def add_decoder(
        self, decoder_id: str, capacity_tokens: int, holds: Iterable[Conversation] = ()
    ) -> list[str]:
        """Take in a decoder that is ready, and holds these conversations (after a table was lost).

        Returns:
            Ids among ``holds`` that live elsewhere by now, or have ended: the decoder is to forget
            them.
        """
        if decoder_id not in self.decoders:
            self.decoders[decoder_id] = Decoder(decoder_id, capacity_tokens)
        foreign = []
        # The oldest first: an engine has no more than it has room for.
        for held in sorted(holds, key=lambda one: one.last_used_s):
            known = self._conversations.get(held.id)
            if known is None and held.incarnation >= self._first_id:
                # This table made it, and has ended it while the decoder was away.
                foreign.append(held.id)
            elif known is None or (
                known.decoder_id is None and known.incarnation == held.incarnation
            ):
                was_on = None if self.memory is None else self.memory.paused_on(held.id)
                if was_on in (None, decoder_id):
                    self._adopt(held, decoder_id)
                else:
                    # It was there before that.
                    foreign.append(held.id)
            elif self._is_newer(held, known):
                # It was paused, and moved on from where the other one is.
                assert self.memory is not None
                self.memory.moved_from(known)
                self._adopt(held, decoder_id)
            elif known.decoder_id != decoder_id:
                foreign.append(held.id)
        return foreign

    @property
    def accepting_decoders(self) -> list[Decoder]:
        """The decoders to which conversations may be bound."""
        if not self._leaving:
            return list(self.decoders.values())
        return [one for one in self.decoders.values() if one.id not in self._leaving]

    @property
    def accepting_prefillers(self) -> list[Prefiller]:
        """The prefillers to which prompts may be sent."""
        if not self._leaving:
            return list(self.prefillers.values())
        return [one for one in self.prefillers.values() if one.id not in self._leaving]

    def engine_says(self, engine_id: str, load: EngineLoad, now_s: float) -> None:
        """Note what an engine says of its work, if the policy asks for that."""
        if self.loads is not None and (engine_id in self.decoders or engine_id in self.prefillers):
            self.loads.says(engine_id, load, now_s)

    def leave(self, engine_id: str) -> None:
        """Let an engine go: it gets nothing new, and keeps what it has."""
        self._leaving.add(engine_id)

    def is_leaving(self, engine_id: str) -> bool:
        """Whether `leave` was called for this engine."""
        return engine_id in self._leaving

    def evict(self, decoder_id: str) -> list[str]:
        """Unbind a decoder's conversations, each as soon as none of its turns runs.

        Returns:
            Ids of those unbound now: their next turns bind again, as do those of the others.
        """
        self._evicting.add(decoder_id)
        idle = [
            conversation
            for conversation in self._conversations.values()
            if conversation.decoder_id == decoder_id and not conversation.running
        ]
        for conversation in idle:
            self._unbind(conversation)
        return [conversation.id for conversation in idle]

    def remove_prefiller(self, prefiller_id: str) -> None:
        """Remove a prefiller that is lost or has left."""
        if self.prefillers.pop(prefiller_id, None) is None:
            return
        self._leaving.discard(prefiller_id)
        if self.loads is not None:
            self.loads.gone(prefiller_id)
        # It may come back under its id, with an empty queue: these prefills must not count then.
        for conversation in self._conversations.values():
            if conversation.prefiller_id == prefiller_id:
                self._leave_prefiller(conversation)

    def remove_decoder(self, decoder_id: str) -> list[str]:
        """Remove a decoder that is lost, and unbind what it held.

        Returns:
            Ids of the conversations that lost their KV; their turns are over.
        """
        if decoder_id not in self.decoders:
            return []
        self._leaving.discard(decoder_id)
        self._evicting.discard(decoder_id)
        self.notices.remove(decoder_id)
        if self.loads is not None:
            self.loads.gone(decoder_id)
        if self.memory is not None:
            self.memory.decoder_lost(decoder_id)
        unbound = []
        for conversation in self._conversations.values():
            if conversation.decoder_id == decoder_id:
                self._kinship.sharing.hold(conversation, 0)
                self.usage.of(conversation.id).turns -= len(conversation.running)
                conversation.decoder_id = None
                self._activity.not_idle(conversation.id)
                if conversation.running:
                    conversation.finished = max(conversation.finished, *conversation.running)
                    if self.memory is not None:
                        self.memory.turns_lost(conversation.running)
                    conversation.running = ()
                    self.reasoning -= 1
                    # It may have been spared for its turn.
                    self._idleness.watch(conversation)
                unbound.append(conversation.id)
        del self.decoders[decoder_id]
        return unbound

    # --- turns -------------------------------------------------------------------------------

    def recognise(self, chain: Chain, conversation_id: str | None = None) -> str | None:
        """The history that a turn continues, or None: it begins another. See `Families`.

        Args:
            chain: of the turn's messages.
            conversation_id: as the client has stated it, scoped to its tenant.
        """
        if conversation_id is not None and identity.is_generated(conversation_id):
            # Its client states the id that it was given: no twin will do.
            own = [one for one in self.histories(conversation_id) if one.root == chain.root]
            for end in (*chain.ends, chain.root):
                those = [one for one in own if mark(end) in one.tails]
                if those:
                    return next((one.id for one in those if not one.running), None)
            return None
        return self._families.match(chain, conversation_id)

    def histories(self, conversation_id: str) -> list[Conversation]:
        """A conversation's live histories, the oldest first."""
        ids = self._groups.of(conversation_id, self._conversations)
        return [self._conversations[id] for id in ids]

    def lives(self, history_id: str) -> bool:
        """Whether its conversation has a live history, this one or another."""
        return self._groups.lives(history_id, self._conversations)

    def has_several(self, history_id: str) -> bool:
        """Whether its conversation has, or has had, other histories than the first."""
        return self._groups.has_further(identity.conversation_of(history_id))

    @property
    def conversations(self) -> int:
        """How many conversations the live histories are of."""
        return len(self._conversations) - self._groups.beyond_one(self._conversations)

    def bind(
        self,
        conversation_id: str,
        turn1_tokens: int,
        now_s: float,
        arrived_s: float | None = None,
        opening: Opening | None = None,
    ) -> Placement | None:
        """Start a turn of a history that is new or paused, or whose decoder was lost.

        Args:
            conversation_id: the history's.
            turn1_tokens: the prompt's length; it counts as held from now on, but for what others
                on that decoder begin with.
            arrived_s: when its first request came, if that was before now.
            opening: what is known of its prompt beside that.

        Returns:
            Where it goes, or None while no decoder has room.

        Raises:
            ValueError: it is bound already; use `begin`.
        """
        known = self._conversations.get(conversation_id)
        if known is not None and known.decoder_id is not None:
            raise ValueError(f"conversation {conversation_id!r} is bound to {known.decoder_id}")
        opening = opening or Opening()
        shared = self._shared(known, conversation_id, opening)
        decoders, prefillers = self.accepting_decoders, self.accepting_prefillers
        placement = self._policy.place(turn1_tokens, decoders, prefillers, shared, now_s)
        root = None if opening.chain is None else opening.chain.root
        waited_s = None
        if known is not None:
            waited_s = 0.0 if arrived_s is None else now_s - arrived_s
        while placement is None and self._make_room(
            conversation_id, turn1_tokens, shared, now_s, waited_s, root
        ):
            # What was shared with those that went is not there any more.
            shared = self._shared(known, conversation_id, opening)
            placement = self._policy.place(turn1_tokens, decoders, prefillers, shared, now_s)
        if placement is None:
            return None
        usage = self.usage.of(conversation_id)
        was_known = known is not None
        if known is None:
            known = Conversation(conversation_id, self._next_id, now_s, now_s)
            known.asked_s = now_s if arrived_s is None else arrived_s
            if opening.chain is not None:
                known.root = opening.chain.root
            usage.began(now_s)
            self._join(known, usage)
            self._idleness.watch(known)
        else:
            # The prefill for the lost decoder may not have been reported as over.
            self._leave_prefiller(known)
        if opening.hints is not None:
            known.hints = opening.hints
        known.decoder_id = placement.decoder_id
        if was_known:
            kept = placement.prefiller_id is None
            if self.loads is not None:
                # Prompts of which nothing is there may stay without a prefiller, too.
                kept = kept and 2 * shared.found(placement.decoder_id) >= turn1_tokens
            last = known.last_turn
            if last is not None and not kept:
                self.recomputed_tokens += min(turn1_tokens, last.prompt_tokens + last.output_tokens)
            known.moves += self.memory is None or self.memory.bound(known, kept)
        self.decoders[placement.decoder_id].conversations += 1
        self._hold(known, turn1_tokens)
        self._kinship.opened(known, opening)
        known.promised = True
        if placement.prefiller_id is not None:
            self._join_prefiller(known, placement.prefiller_id, turn1_tokens)
        if self.loads is not None:
            self.loads.placed(known.id, turn1_tokens, placement, shared, now_s)
        self._start_turn(known, usage, now_s, arrived_s)
        return placement

    def held(self, opening: Opening) -> int:
        """The most of a prompt that any decoder holds already, in tokens."""
        return self._kinship.held(opening, self.accepting_decoders)

    def active(self, now_s: float) -> int:
        """How many histories are at work: a turn runs, or did within `RECENT_S`."""
        return self.reasoning + self._activity.acting(now_s)

    def take_displaced(self) -> list[Conversation]:
        """The histories that `bind` has ended since, to make room for others of theirs."""
        displaced, self._displaced = self._displaced, []
        return displaced

    def begin(
        self, conversation_id: str, now_s: float, hints: Hints | None = None
    ) -> Conversation | None:
        """Start a turn of a bound conversation; None if it is unknown or unbound.

        Args:
            hints: what its client says beside its messages; they stay until others come.
        """
        conversation = self._conversations.get(conversation_id)
        if conversation is None or conversation.decoder_id is None:
            return None
        if conversation.decoder_id in self._evicting and not conversation.running:
            self._unbind(conversation)
            return None
        if hints is not None:
            conversation.hints = hints
        self._start_turn(conversation, self.usage.of(conversation_id), now_s)
        if self.loads is not None:
            self.loads.turn_came(conversation.decoder_id, now_s)
        return conversation

    def began(self, turn: TurnKey, decoder_id: str, now_s: float, parks: bool = False) -> bool:
        """Note that a decoder has begun a turn by itself.

        Where the history was paused before the decoder has heard of that, it is bound there again,
        room or not: what runs is not paused.

        Args:
            parks: whether it is to leave its prompt's KV in host memory.

        Returns:
            False, with nothing changed, if the history has ended, or is not there any more.
        """
        conversation = self._current(turn.conversation_id, turn.incarnation)
        if conversation is None or decoder_id not in self.decoders:
            return False
        if conversation.decoder_id is None:
            if not self.notices.may_run(decoder_id, conversation.id, conversation.incarnation):
                return False
            self._take_back(conversation, decoder_id)
        if conversation.decoder_id != decoder_id:
            return False
        usage = self.usage.of(conversation.id)
        self._start_turn(conversation, usage, now_s, turn_id=turn.turn_id)
        if self.loads is not None:
            self.loads.turn_came(decoder_id, now_s)
        if parks and self.memory is not None:
            self.memory.parks_turn(turn.turn_id)
        return True

    def to_be_heard(self, chain: Chain, conversation_id: str | None) -> str | None:
        """The decoder of a running turn whose answer a turn may follow, and that may have ended.

        It may be where the turn's messages go on beyond what is known of the history.

        Args:
            chain: of the turn's messages.
            conversation_id: as the client has stated it, scoped to its tenant.
        """
        if not chain.ends:
            return None
        newest = mark(chain.ends[0])
        ends = {mark(end) for end in (*chain.ends, chain.root)}
        for history_id in islice(self._families.newest(chain.root), _LOOKED_AT):
            history = self._conversations[history_id]
            its_own = scope_of(history) == scope_for(conversation_id)
            if not history.running or not its_own or newest in history.tails:
                continue
            if history.decoder_id is not None and not ends.isdisjoint(history.tails):
                return history.decoder_id
        return None

    def prefill_later_turn(
        self, conversation: Conversation, prompt_tokens: int | None = None, now_s: float = 0.0
    ) -> str | None:
        """Where the turn that a conversation has just begun is prefilled; None: on its decoder.

        Args:
            prompt_tokens: the whole prompt's length; None: it is not known. In a prefiller's queue
                the turn counts with what the conversation holds then.
        """
        appended = None
        if prompt_tokens is not None and conversation.decoder_id is not None:
            appended = Appended(
                conversation.decoder_id,
                prompt_tokens,
                min(conversation.held_tokens, prompt_tokens - 1),
                0 if self.memory is None else self.memory.parked_of(conversation),
            )
        pool = self.accepting_prefillers
        prefiller_id = self._policy.prefill_later_turn(pool, appended, now_s)
        queued_tokens = conversation.held_tokens
        if appended is not None:
            cached_tokens = appended.held_tokens
            if prefiller_id is not None:
                cached_tokens = min(appended.parked_tokens, cached_tokens)
            queued_tokens = appended.tokens - cached_tokens
            if self.loads is not None:
                self.loads.appended(
                    conversation.id,
                    queued_tokens,
                    cached_tokens,
                    prefiller_id or appended.decoder_id,
                    now_s,
                    lent=prefiller_id is not None,
                )
        if prefiller_id is not None:
            self._leave_prefiller(conversation)
            self._join_prefiller(conversation, prefiller_id, queued_tokens)
        return prefiller_id

    def park(self, conversation: Conversation) -> bool:
        """Whether the turn that a conversation has just begun leaves its KV in host memory too."""
        return self.memory is not None and self.memory.park(conversation)

    def prefilled(self, turn: TurnKey, stored_tokens: int = 0) -> None:
        """Note that the remote prefill that a turn waited for is over, done or failed.

        The prefiller's queue is shorter then. A conversation has one such prefill at a time,
        whichever of its turns says so.

        Args:
            stored_tokens: how much of its prompt it has left in host memory.
        """
        conversation = self._current(turn.conversation_id, turn.incarnation)
        if conversation is not None:
            self._leave_prefiller(conversation)
            if self.memory is not None and stored_tokens:
                self.memory.parked(conversation, stored_tokens)

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
        conversation = self._current(turn.conversation_id, turn.incarnation)
        if conversation is None or conversation.decoder_id != decoder_id:
            return False
        if turn.turn_id not in conversation.running:
            if turn.turn_id <= conversation.finished:
                return False
            self._number_above(turn.turn_id)
        conversation.turns += 1
        self._compare(conversation, stats)
        has_kin = False
        if tails:
            has_kin = self._families.set_tails(conversation, tails, stats)
        else:
            conversation.last_turn = stats
        self._finish_turn(conversation, turn.turn_id, stats, now_s)
        if has_kin:
            self._kinship.advanced(conversation)
        return True

    def abandon(
        self,
        turn: TurnKey,
        decoder_id: str | None,
        stats: TurnStats | None,
        now_s: float,
    ) -> Conversation | None:
        """End a turn that did not complete: it was refused, or failed, or its client went away.

        As with `advance`, a turn may have begun under a table that was lost.

        Args:
            decoder_id: who says so; None if it is not a decoder.
            stats: what the engine had done by then, if it got so far.

        Returns:
            The conversation if this ended it: no turn of it is known to have left anything, or
            its client cannot come back to it.
        """
        conversation = self._current(turn.conversation_id, turn.incarnation)
        if conversation is None:
            return None
        began_elsewhere = (
            stats is not None
            and turn.turn_id > conversation.finished
            and decoder_id is not None
            and decoder_id == conversation.decoder_id
        )
        if turn.turn_id in conversation.running or began_elsewhere:
            self._number_above(turn.turn_id)
            if stats is not None:
                conversation.last_turn = stats
            self._finish_turn(conversation, turn.turn_id, stats, now_s)
            if stats is not None:
                # Its engine may have had nothing of it any more, and has computed it again.
                self._kinship.advanced(conversation)
        if not conversation.running:
            if not conversation.has_last_turn or not conversation.can_go_on:
                return self.release(turn.conversation_id)
            if conversation.promised:
                # Nothing of it ever got to the decoder that it was to move to.
                self._unbind(conversation)
        return None

    def answered(self, turn: TurnKey, at_s: float) -> float | None:
        """Note that a turn's first token came that is not a tool call's.

        Returns:
            The conversation's TTFET, if it was its first such, as far as is known.
        """
        conversation = self._current(turn.conversation_id, turn.incarnation)
        if conversation is None or conversation.asked_s is None or conversation.ttfet_s is not None:
            return None
        if self.loads is not None and conversation.decoder_id is not None:
            self.loads.done(conversation.decoder_id, conversation.id)
        asked_s = conversation.asked_s
        if self.has_several(conversation.id):
            for one in self._siblings(conversation.id):
                if one.asked_s is None or one.ttfet_s is not None:
                    return None
                asked_s = min(asked_s, one.asked_s)
        conversation.ttfet_s = at_s - asked_s
        return conversation.ttfet_s

    def used_energy(self, conversation_id: str, incarnation: int, joules: float) -> None:
        """Note that a live conversation has taken so many joules of its engines' energy."""
        conversation = self._current(conversation_id, incarnation)
        if conversation is not None:
            conversation.energy_j += joules

    def release(self, conversation_id: str) -> Conversation | None:
        """End a conversation; its tokens no longer count. None if it is unknown."""
        conversation = self._take_out(conversation_id)
        if conversation is not None:
            self._give_up(conversation, ended=True)
            if self.memory is not None:
                self.memory.ended(conversation)
        return conversation

    def expire(self, now_s: float) -> list[Conversation]:
        """End the conversations that were not used for the idle time.

        Returns:
            The conversations that it ended, the longest unused first.
        """
        ended = self._idleness.ended(now_s)
        for conversation in ended:
            if self.memory is not None and not conversation.running:
                self.memory.expired(conversation, now_s)
            self.release(conversation.id)
        ended.sort(key=lambda c: c.last_used_s)
        return ended

    def holds(self, turn: TurnKey, decoder_id: str) -> bool:
        """Whether the conversation of this turn is live, and is, or was when paused, there."""
        conversation = self._current(turn.conversation_id, turn.incarnation)
        if conversation is None:
            return False
        if self.memory is not None and self.memory.paused_on(conversation.id) == decoder_id:
            return True
        return conversation.decoder_id == decoder_id

    # --- inside ------------------------------------------------------------------------------

    def _current(self, conversation_id: str, incarnation: int) -> Conversation | None:
        conversation = self._conversations.get(conversation_id)
        if conversation is None or conversation.incarnation != incarnation:
            return None
        return conversation

    def _take_out(self, conversation_id: str) -> Conversation | None:
        conversation = self._conversations.pop(conversation_id, None)
        if conversation is None:
            return None
        self.tools.forget(conversation_id)
        self._leave_prefiller(conversation)
        self._hold(conversation, 0)
        if conversation.decoder_id is not None:
            self.decoders[conversation.decoder_id].conversations -= 1
        usage = self.usage.of(conversation_id)
        usage.conversations -= self._groups.discard(conversation.id, self._conversations)
        usage.histories -= 1
        usage.turns -= len(conversation.running)
        if conversation.running:
            self.reasoning -= 1
        self._activity.not_idle(conversation.id)
        self._families.leave(conversation)
        return conversation

    def _is_newer(self, held: Conversation, known: Conversation) -> bool:
        """Whether one decoder's record of a history is of a later turn than another's."""
        return (
            self.memory is not None
            and known.decoder_id is not None
            and held.incarnation == known.incarnation
            and max((held.finished, *held.running)) > known.finished
            and not known.running
        )

    def _siblings(self, history_id: str) -> list[Conversation]:
        """The other histories of a conversation that was named."""
        conversation_id = identity.conversation_of(history_id)
        return [one for one in self.histories(conversation_id) if one.id != history_id]

    def _shared(self, known: Conversation | None, history_id: str, opening: Opening) -> Shared:
        """What decoders have of a prompt already."""
        shared = NOTHING_SHARED
        if self._kinship.has_any(opening):
            decoders = self.accepting_decoders
            shared = self._kinship.shared(opening, decoders, history_id, self._siblings)
        if self.memory is not None and known is not None:
            shared = self.memory.found(history_id, shared)
        return shared

    def _make_room(
        self,
        history_id: str,
        turn1_tokens: int,
        shared: Shared,
        now_s: float,
        waited_s: float | None,
        root: Digest | None,
    ) -> bool:
        """Have idle histories make room for a prompt that fits nowhere; whether any did."""
        decoders = self._homes(now_s)
        if self.memory is None:
            return self._displace(history_id, turn1_tokens, decoders)
        any_runs = self.reasoning > 0
        if self.memory.make_room(turn1_tokens, decoders, shared, now_s, waited_s, root, any_runs):
            return True
        # A conversation that is compacted would wait for itself.
        in_the_way = self._in_the_way(history_id, turn1_tokens, decoders)
        if in_the_way is not None:
            self.memory.pause(in_the_way, "room")
        return in_the_way is not None

    def _homes(self, now_s: float) -> list[Decoder]:
        """The decoders to which the policy would bind a conversation, had they room."""
        decoders = self.accepting_decoders
        if isinstance(self._policy, ElasticPlacement):
            return self._policy.homes(decoders, self.accepting_prefillers, now_s)
        return decoders

    def _displace(self, history_id: str, turn1_tokens: int, decoders: list[Decoder]) -> bool:
        """End what a conversation left behind, where a new history of it fits nowhere.

        Returns:
            Whether a decoder has room now.
        """
        in_the_way = self._in_the_way(history_id, turn1_tokens, decoders)
        if in_the_way is None:
            return False
        self._displaced.append(in_the_way)
        self.release(in_the_way.id)
        return True

    def _in_the_way(
        self, history_id: str, turn1_tokens: int, decoders: list[Decoder]
    ) -> Conversation | None:
        """The history that a conversation has left for a new one, which fits nowhere else.

        A conversation that is compacted would wait for itself. Which history it has left its client
        does not say: it is clear where there is one alone that is idle and in the way.
        """
        in_the_way = [
            one
            for one in self._siblings(history_id)
            if one.decoder_id is not None
            and not one.running
            and self._fits_without(one, turn1_tokens, decoders)
        ]
        return in_the_way[0] if len(in_the_way) == 1 else None

    @staticmethod
    def _fits_without(history: Conversation, tokens: int, decoders: list[Decoder]) -> bool:
        decoder = next((one for one in decoders if one.id == history.decoder_id), None)
        return decoder is not None and tokens <= decoder.free_tokens + held_alone(history)

    def _compare(self, conversation: Conversation, stats: TurnStats) -> None:
        """Compare what the account has of a history with what its engine had at a turn's begin."""
        base = conversation.base
        if not conversation.promised:
            expected = conversation.held_tokens
        elif base is not None:
            expected = base.tokens
        else:
            return  # Nothing is expected, as of most first turns.
        found = stats.decoder_cached_tokens + stats.lmcache_tokens
        self.expected_cached_tokens += expected
        self.missing_cached_tokens += max(0, expected - found)
        if base is not None and found < base.tokens // 2:
            # The engine had to compute it anew: whoever else began with it has lost it too.
            lost = self._kinship.evicted(conversation)
            if self.memory is not None:
                self.memory.lost(lost)
        elif found < expected and not conversation.promised:
            # A template may drop the reasoning of earlier answers: the turn does not begin with all
            # that the one before it left.
            points = Points(conversation.points)
            points.clip(found)
            conversation.points = points.packed

    def _charge(self, conversation: Conversation, tokens: int) -> None:
        assert conversation.decoder_id is not None
        self.decoders[conversation.decoder_id].held_tokens += tokens
        self.usage.of(conversation.id).held_tokens += tokens

    def _join(self, conversation: Conversation, usage: TenantUsage) -> None:
        usage.conversations += self._groups.add(conversation.id, self._conversations)
        usage.histories += 1
        self._conversations[conversation.id] = conversation
        self._families.join(conversation)
        usage.turns += len(conversation.running)

    def _start_turn(
        self,
        conversation: Conversation,
        usage: TenantUsage,
        now_s: float,
        arrived_s: float | None = None,
        turn_id: int | None = None,
    ) -> None:
        if turn_id is None:
            turn_id = self._next_id
            self._next_id += STRIDE
        usage.turns += 1
        if self.memory is not None:
            idle = conversation.has_last_turn and not conversation.running
            came_s = now_s if arrived_s is None else arrived_s
            self.memory.turn_begins(conversation, came_s if idle else None)
        self.tools.forget(conversation.id)
        if not conversation.running:
            self.reasoning += 1
            self._activity.not_idle(conversation.id)
        conversation.running += (turn_id,)
        conversation.last_used_s = now_s

    def _number_above(self, turn_id: int) -> None:
        self._next_id = max(self._next_id, first_asked(turn_id + 1))

    def _finish_turn(
        self, conversation: Conversation, turn_id: int, stats: TurnStats | None, now_s: float
    ) -> None:
        self._leave_prefiller(conversation)
        if self.loads is not None:
            self.loads.turn_ended(conversation, stats, now_s)
        running = conversation.running
        if turn_id in running:
            at = running.index(turn_id)
            # Its own number is kept, not the caller's equal one, as with the id.
            turn_id = running[at]
            self.usage.of(conversation.id).turns -= 1
            conversation.running = running[:at] + running[at + 1 :]
            if not conversation.running:
                self.reasoning -= 1
                self._activity.idle(conversation.id, now_s)
        conversation.finished = max(conversation.finished, turn_id)
        if stats is not None:
            conversation.promised = False
            # One object for all histories that wait for the same.
            conversation.tool = None if stats.tool is None else intern(stats.tool)
            self._hold(conversation, stats.prompt_tokens + stats.output_tokens)
        conversation.last_used_s = now_s
        if self.memory is not None:
            self.memory.used(conversation)
            self.memory.turn_ended(conversation, turn_id, stats)

    def _take_back(self, conversation: Conversation, decoder_id: str) -> None:
        conversation.decoder_id = decoder_id
        self.decoders[decoder_id].conversations += 1
        self._hold(conversation, conversation.last_tokens)
        self._kinship.advanced(conversation)
        if self.memory is not None:
            self.memory.bound(conversation, kept=True)

    def _unbind(self, conversation: Conversation) -> None:
        self._hold(conversation, 0)
        if conversation.decoder_id is not None:
            self.decoders[conversation.decoder_id].conversations -= 1
            self._give_up(conversation)
        conversation.decoder_id = None
        conversation.promised = False
        self._activity.not_idle(conversation.id)

    def _give_up(self, conversation: Conversation, *, ended: bool = False) -> None:
        if conversation.decoder_id is not None:
            decoder_id, incarnation = conversation.decoder_id, conversation.incarnation
            self.notices.give_up(decoder_id, conversation.id, incarnation, ended=ended)

    def _hold(self, conversation: Conversation, tokens: int) -> None:
        if conversation.decoder_id is not None:
            self._kinship.sharing.hold(conversation, tokens)

    def _join_prefiller(self, conversation: Conversation, prefiller_id: str, tokens: int) -> None:
        conversation.prefiller_id = prefiller_id
        conversation.prefill_tokens = tokens
        self.prefillers[prefiller_id].queued_tokens += tokens

    def _leave_prefiller(self, conversation: Conversation) -> None:
        if conversation.prefiller_id is None:
            return
        if self.loads is not None:
            self.loads.done(conversation.prefiller_id, conversation.id)
        prefiller = self.prefillers.get(conversation.prefiller_id)
        if prefiller is not None:
            prefiller.queued_tokens -= conversation.prefill_tokens
        conversation.prefiller_id = None
        conversation.prefill_tokens = 0

    def _adopt(self, held: Conversation, decoder_id: str) -> None:
        known = self._take_out(held.id)
        if known is not None:
            # What a decoder cannot know: the conversation's life before it came there.
            held.created_s = known.created_s
            held.turns = max(held.turns, known.turns)
            held.moves = known.moves
            held.asked_s, held.ttfet_s = known.asked_s, known.ttfet_s
            held.energy_j = known.energy_j
            held.hints = known.hints
        usage = self.usage.of(held.id)
        if known is None:
            usage.began(held.created_s)
        self._join(held, usage)
        self._idleness.watch_in_place(held, known)
        self._number_above(max(held.incarnation, held.finished, *held.running))
        tokens, held.held_tokens = held.held_tokens, 0
        held.decoder_id = decoder_id
        held.promised = False
        held.prefiller_id = None
        held.prefill_tokens = 0
        self.decoders[decoder_id].conversations += 1
        self._hold(held, tokens)
        if held.running:
            self.reasoning += 1
        self._kinship.advanced(held)
        if self.memory is not None:
            self.memory.found_on(held)
            self.memory.used(held)
