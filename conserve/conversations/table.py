"""The table of live conversations, as others see it."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass

from conserve.conversations.binding import Binding
from conserve.conversations.ending import Ending, Idleness
from conserve.conversations.engines import Engines
from conserve.conversations.ledger import Ledger
from conserve.conversations.turns import Turns
from conserve.events import EventLog
from conserve.history import History, TurnKey
from conserve.pausing import Memory, Pausing
from conserve.placement import Decoder, Loads, PlacementPolicy, Prefiller


@dataclass(eq=False)
class Membership:
    """Adds decoders and takes over what they hold; unbinds histories of those that go."""

    _ledger: Ledger
    _engines: Engines
    _turns: Turns
    _idleness: Idleness
    _memory: Memory | None

    def __post_init__(self) -> None:
        self._by_id, self._kinship = self._ledger.live.by_id, self._ledger.live.kinship
        # Of a predecessor: where its histories were bound, until they are again, and those of which
        # turns run.
        self._homes: dict[str, str] = {}
        self._running: dict[str, list[History]] = {}

    def take_over(self, histories: Iterable[History]) -> None:
        """Add a predecessor's histories. Each is bound once its decoder registers."""
        for history in histories:
            decoder_id = history.decoder_id
            if decoder_id is not None:
                self._homes[history.id] = decoder_id
                if history.running:
                    self._running.setdefault(decoder_id, []).append(copy.copy(history))
            history.decoder_id = history.prefiller_id = history.base = None
            history.held_tokens = history.prefill_tokens = 0
            history.running, history.promised = (), False
            usage = self._ledger.usage.of(history.id)
            usage.began(history.created_s)
            self._ledger.add(history, usage)
            self._idleness.watch_in_place(history, None)

    def add_decoder(
        self, decoder_id: str, capacity_tokens: int, holds: Iterable[History] = ()
    ) -> list[str]:
        """Add a decoder that may hold histories (after a table was lost).

        Returns ids among ``holds`` that live elsewhere by now, or have ended, for the decoder to
        forget.
        """
        self._engines.add_decoder(decoder_id, capacity_tokens)
        foreign = []
        # The oldest first: an engine has no more than it has room for.
        holds = self._with_running(decoder_id, holds)
        for held in sorted(holds, key=lambda one: one.last_used_s):
            known = self._by_id.get(held.id)
            if known is not None and self._homes.get(held.id, decoder_id) != decoder_id:
                # It had moved, which this decoder has not heard yet.
                foreign.append(held.id)
            elif known is None and held.incarnation >= self._turns.first_id:
                # This table made it, and has ended it while the decoder was away.
                foreign.append(held.id)
            elif known is None or (
                known.decoder_id is None and known.incarnation == held.incarnation
            ):
                was_on = None if self._memory is None else self._memory.paused_on(held.id)
                if was_on in (None, decoder_id):
                    self._adopt(held, decoder_id)
                else:
                    # It was on this decoder before it was paused on another.
                    foreign.append(held.id)
            elif self._is_newer(held, known):
                # It was paused, and has moved on from the decoder that is known.
                assert self._memory is not None
                self._memory.moved_from(known)
                self._adopt(held, decoder_id)
            elif known.decoder_id != decoder_id:
                foreign.append(held.id)
        return foreign

    def _with_running(self, decoder_id: str, holds: Iterable[History]) -> list[History]:
        """Return what a decoder holds, with turns that a predecessor has sent to it meanwhile."""
        held = {one.id: one for one in holds}
        for sent in self._running.pop(decoder_id, ()):
            one = held.setdefault(sent.id, sent)
            if one.incarnation == sent.incarnation:
                new = (turn for turn in sent.running if turn > one.finished)
                one.running = tuple(sorted({*one.running, *new}))
        return list(held.values())

    def _is_newer(self, held: History, known: History) -> bool:
        return (
            self._memory is not None
            and known.decoder_id is not None
            and held.incarnation == known.incarnation
            and max((held.finished, *held.running)) > known.finished
            and not known.running
        )

    def _adopt(self, held: History, decoder_id: str) -> None:
        known = self._ledger.take_out(held.id)
        self._homes.pop(held.id, None)
        if known is not None:
            # A decoder does not know the conversation's life before it came there.
            held.created_s = known.created_s
            held.turns = max(held.turns, known.turns)
            held.moves = known.moves
            held.asked_s, held.ttfet_s = known.asked_s, known.ttfet_s
            held.energy_j = known.energy_j
            held.hints = known.hints
        usage = self._ledger.usage.of(held.id)
        if known is None:
            usage.began(held.created_s)
        self._ledger.add(held, usage)
        self._idleness.watch_in_place(held, known)
        self._turns.number_above(max(held.incarnation, held.finished, *held.running))
        tokens, held.held_tokens = held.held_tokens, 0
        held.promised = False
        held.prefiller_id = None
        held.prefill_tokens = 0
        self._ledger.bind(held, decoder_id, tokens)
        self._kinship.advanced(held)
        if self._memory is not None:
            self._memory.found_on(held)
            self._memory.used(held)

    def evict(self, decoder_id: str) -> list[str]:
        """Unbind a decoder's idle histories, the others later, and return their ids."""
        self._engines.evicting.add(decoder_id)
        idle = [
            history
            for history in self._by_id.values()
            if history.decoder_id == decoder_id and not history.running
        ]
        for history in idle:
            self._ledger.unbind(history)
        return [history.id for history in idle]

    def remove_prefiller(self, prefiller_id: str) -> None:
        if prefiller_id not in self._engines.prefillers:
            return
        self._engines.remove_prefiller(prefiller_id)
        # It may come back under its id, with an empty queue.
        for history in self._by_id.values():
            if history.prefiller_id == prefiller_id:
                self._engines.leave_queue(history)

    def remove_decoder(self, decoder_id: str) -> list[str]:
        """Remove a decoder that is lost, end its turns, and return the ids of its histories."""
        if decoder_id not in self._engines.decoders:
            return []
        self._ledger.notices.remove(decoder_id)
        if self._memory is not None:
            self._memory.decoder_lost(decoder_id)
        unbound = []
        for history in self._by_id.values():
            if history.decoder_id == decoder_id:
                running = history.running
                self._ledger.lose(history)
                if running:
                    if self._memory is not None:
                        self._memory.turns_lost(history.id, running)
                    # It may have been kept for its running turn.
                    self._idleness.watch(history)
                unbound.append(history.id)
        self._engines.remove_decoder(decoder_id)
        return unbound


# For the process that keeps a table: finding and freeing conversations' scattered objects on pages
# of 4 KB takes mostly address translation. Python's own allocator cannot ask for huge pages,
# glibc's (2.35 and later) can. It costs 140 bytes a conversation.
MEMORY_ENVIRONMENT = {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


class ConversationTable:
    """Bindings of live conversations to decoders.

    A history's life: `bind` (its first turn starts), `prefilled`, `advance` (the turn is complete),
    then `begin` and `advance` for each later turn, and `release`. `abandon` ends a turn that did
    not complete. When a decoder is lost, its histories stay, unbound, and their next turns bind
    again. Ending a turn twice changes nothing.

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
        self.loads: Loads | None = policy.loads
        self._engines = engines = Engines(policy.loads)
        self._ledger = ledger = Ledger(engines)
        self._live = ledger.live
        self.decoders, self.prefillers = engines.decoders, engines.prefillers
        self.usage, self.tools, self.notices = ledger.usage, ledger.tools, ledger.notices
        by_id = ledger.live.by_id
        idleness = Idleness(idle_timeout_s, turn_timeout_s, by_id)
        self.memory: Memory | None = None
        if pausing is not None:
            self.memory = Memory(
                pausing, engines.decoders, by_id.get, ledger.unbind, events, ledger.tools
            )
        self._ending = ending = Ending(ledger, idleness, self.memory)
        self._turns = turns = Turns(ledger, engines, ending, self.memory, first_id)
        self._binding = binding = Binding(
            policy, ledger, engines, turns, ending, idleness, self.memory
        )
        membership = Membership(ledger, engines, turns, idleness, self.memory)

        self.get = by_id.get
        self.recognise, self.to_be_heard = ledger.live.recognise, ledger.live.to_be_heard
        self.rooted = ledger.live.kinship.families.rooted
        self.histories, self.lives = ledger.live.histories, ledger.live.lives
        self.has_several = ledger.live.has_several
        self.active, self.facts = ledger.active, ledger.facts

        self.take_over, self.end_when_idle_for = membership.take_over, idleness.change
        self.add_prefiller, self.add_decoder = engines.add_prefiller, membership.add_decoder
        self.engine_says, self.leave = engines.says, engines.leave
        self.is_leaving, self.evict = engines.is_leaving, membership.evict
        self.remove_prefiller = membership.remove_prefiller
        self.remove_decoder = membership.remove_decoder

        self.bind, self.held = binding.bind, binding.held
        self.take_displaced = binding.take_displaced
        self.begin = binding.begin
        self.began, self.prefilled = turns.began, turns.prefilled
        self.prefill_later_turn = binding.prefill_later_turn
        self.advance, self.abandon, self.answered = turns.advance, turns.abandon, turns.answered
        self.release, self.expire = ending.release, ending.expire

    def __len__(self) -> int:
        return len(self._live.by_id)

    def __contains__(self, history_id: str) -> bool:
        return history_id in self._live.by_id

    def live(self) -> list[History]:
        return list(self._live.by_id.values())

    @property
    def conversations(self) -> int:
        return self._live.conversations

    @property
    def reasoning(self) -> int:
        return self._ledger.reasoning

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

    @property
    def accepting_decoders(self) -> list[Decoder]:
        return self._engines.accepting_decoders

    @property
    def accepting_prefillers(self) -> list[Prefiller]:
        return self._engines.accepting_prefillers

    def engine_joined(
        self, engine_id: str, kind: str, handoffs: Iterable[tuple[int, float]] = ()
    ) -> None:
        """Note an engine's kind and handoffs; see `Loads.joined`."""
        if self.loads is not None:
            self.loads.joined(engine_id, kind, tuple(handoffs))

    def park(self, history: History) -> bool:
        """Return whether the turn that has just begun leaves its KV in host memory too."""
        return self.memory is not None and self.memory.park(history)

    def used_energy(self, history_id: str, incarnation: int, joules: float) -> None:
        history = self._live.current(history_id, incarnation)
        if history is not None:
            history.energy_j += joules

    def holds(self, turn: TurnKey, decoder_id: str) -> bool:
        """Return whether a turn's history is on this decoder, or was when it was paused."""
        history = self._live.current(turn.history_id, turn.incarnation)
        if history is None:
            return False
        if self.memory is not None and self.memory.paused_on(history.id) == decoder_id:
            return True
        return history.decoder_id == decoder_id
