"""The table of live conversations, as others see it."""

import copy
from collections.abc import Iterable

from conserve.conversations.binding import Binding
from conserve.history import History, State
from conserve.turn import TurnKey

# For the process that keeps a table: finding and freeing conversations' scattered objects on pages
# of 4 KB takes mostly address translation. Python's own allocator cannot ask for huge pages,
# glibc's (2.35 and later) can. It costs 140 bytes a conversation.
MEMORY_ENVIRONMENT = {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


class ConversationTable(Binding):
    """Bindings of live conversations to decoders.

    A history's life: `bind` (its first turn starts), `prefilled`, `advance` (the turn is complete),
    then `begin` and `advance` for each later turn, and `release`. `abandon` ends a turn that did
    not complete. When a decoder is lost, its histories stay, unbound, and their next turns bind
    again. Ending a turn twice changes nothing.
    """

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
        return history.home == decoder_id

    # --- engines come and go -----------------------------------------------------------------

    def take_over(self, histories: Iterable[History]) -> None:
        """Add a predecessor's histories. Each is bound once its decoder registers."""
        for history in histories:
            decoder_id = history.home
            if decoder_id is not None:
                self._homes[history.id] = decoder_id
                if history.running:
                    self._running.setdefault(decoder_id, []).append(copy.copy(history))
            history.home = history.prefiller_id = history.base = None
            history.held_tokens = history.prefill_tokens = 0
            history.running, history.promised = (), False
            history.state = State.UNBOUND
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
            elif known is None and held.incarnation >= self.first_id:
                # This table made it, and has ended it while the decoder was away.
                foreign.append(held.id)
            elif known is None or (known.home is None and known.incarnation == held.incarnation):
                was_on = None if self.memory is None else self.memory.paused_on(held.id)
                if was_on in (None, decoder_id):
                    self._adopt(held, decoder_id)
                else:
                    # It was on this decoder before it was paused on another.
                    foreign.append(held.id)
            elif self._is_newer(held, known):
                # It was paused, and has moved on from the decoder that is known.
                assert self.memory is not None
                self.memory.moved_from(known)
                self._adopt(held, decoder_id)
            elif known.home != decoder_id:
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
            self.memory is not None
            and known.home is not None
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
        self._number_above(max(held.incarnation, held.finished, *held.running))
        tokens, held.held_tokens = held.held_tokens, 0
        held.promised = False
        held.prefiller_id = None
        held.prefill_tokens = 0
        self._ledger.bind(held, decoder_id, tokens)
        self._kinship.advanced(held)
        if self.memory is not None:
            self.memory.found_on(held)
            self.memory.used(held)

    def evict(self, decoder_id: str) -> list[str]:
        """Unbind a decoder's idle histories, the others later, and return their ids."""
        self._engines.evicting.add(decoder_id)
        idle = [
            history
            for history in self._by_id.values()
            if history.home == decoder_id and not history.running
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
        if self.memory is not None:
            self.memory.decoder_lost(decoder_id)
        unbound = []
        for history in self._by_id.values():
            if history.home == decoder_id:
                running = history.running
                self._ledger.lose(history)
                if running:
                    if self.memory is not None:
                        self.memory.turns_lost(history.id, running)
                    # It may have been kept for its running turn.
                    self._idleness.watch(history)
                unbound.append(history.id)
        self._engines.remove_decoder(decoder_id)
        return unbound
