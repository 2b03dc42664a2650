"""Adds engines with what they hold, and removes them."""

from collections.abc import Iterable

from conserve.conversations.engines import Engines
from conserve.conversations.ledger import Ledger
from conserve.conversations.turns import Turns
from conserve.history import History
from conserve.idleness import Idleness
from conserve.pausing import Memory


class Membership:
    """Adds decoders and takes over what they hold; unbinds histories of those that go."""

    def __init__(
        self,
        ledger: Ledger,
        engines: Engines,
        turns: Turns,
        idleness: Idleness,
        memory: Memory | None,
    ) -> None:
        self._ledger = ledger
        self._by_id = ledger.live.by_id
        self._kinship = ledger.live.kinship
        self._engines = engines
        self._turns = turns
        self._idleness = idleness
        self._memory = memory

    def add_decoder(
        self, decoder_id: str, capacity_tokens: int, holds: Iterable[History]
    ) -> list[str]:
        """Add a decoder that is ready, and that may hold histories (after a table was lost).

        Returns:
            Ids among ``holds`` that live elsewhere by now, or have ended. The decoder should forget
                them.
        """
        self._engines.add_decoder(decoder_id, capacity_tokens)
        foreign = []
        # The oldest first: an engine has no more than it has room for.
        for held in sorted(holds, key=lambda one: one.last_used_s):
            known = self._by_id.get(held.id)
            if known is None and held.incarnation >= self._turns.first_id:
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

    def _is_newer(self, held: History, known: History) -> bool:
        """Return whether a decoder's record of a history is of a later turn than the known one."""
        return (
            self._memory is not None
            and known.decoder_id is not None
            and held.incarnation == known.incarnation
            and max((held.finished, *held.running)) > known.finished
            and not known.running
        )

    def _adopt(self, held: History, decoder_id: str) -> None:
        known = self._ledger.take_out(held.id)
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
        """Unbind a decoder's histories, each as soon as none of its turns runs.

        Returns:
            Ids of those unbound now.
        """
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
        """Remove a prefiller that is lost or has left."""
        if prefiller_id not in self._engines.prefillers:
            return
        self._engines.remove_prefiller(prefiller_id)
        # It may come back under its id, with an empty queue.
        for history in self._by_id.values():
            if history.prefiller_id == prefiller_id:
                self._engines.leave_queue(history)

    def remove_decoder(self, decoder_id: str) -> list[str]:
        """Remove a decoder that is lost, unbind what it held, and end those turns.

        Returns:
            Ids of the histories that lost their KV.
        """
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
                        self._memory.turns_lost(running)
                    # It may have been kept for its running turn.
                    self._idleness.watch(history)
                unbound.append(history.id)
        self._engines.remove_decoder(decoder_id)
        return unbound
