"""Engines come, with what they hold, and go, and what becomes of the histories that they had."""

from collections.abc import Iterable

from conserve.conversations.engines import Engines
from conserve.conversations.ledger import Ledger
from conserve.conversations.turns import Turns
from conserve.history import History
from conserve.idleness import Idleness
from conserve.pausing import Memory


class Membership:
    """Takes decoders in, and over what they hold; unbinds what was on those that go.

    Args:
        turns: are numbered above those that decoders know of.
        idleness: looks at histories that were taken over, or have lost their turns.
        memory: who is paused; None without pausing.
    """

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

    # --- they come ---------------------------------------------------------------------------

    def add_decoder(
        self, decoder_id: str, capacity_tokens: int, holds: Iterable[History]
    ) -> list[str]:
        """See `ConversationTable.add_decoder`."""
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
                    # It was there before that.
                    foreign.append(held.id)
            elif self._is_newer(held, known):
                # It was paused, and moved on from where the other one is.
                assert self._memory is not None
                self._memory.moved_from(known)
                self._adopt(held, decoder_id)
            elif known.decoder_id != decoder_id:
                foreign.append(held.id)
        return foreign

    def _is_newer(self, held: History, known: History) -> bool:
        """Whether one decoder's record of a history is of a later turn than another's."""
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
            # What a decoder cannot know: the conversation's life before it came there.
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

    # --- they go -----------------------------------------------------------------------------

    def evict(self, decoder_id: str) -> list[str]:
        """See `ConversationTable.evict`."""
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
        """See `ConversationTable.remove_prefiller`."""
        if prefiller_id not in self._engines.prefillers:
            return
        self._engines.remove_prefiller(prefiller_id)
        # It may come back under its id, with an empty queue: these prefills must not count then.
        for history in self._by_id.values():
            if history.prefiller_id == prefiller_id:
                self._engines.leave_queue(history)

    def remove_decoder(self, decoder_id: str) -> list[str]:
        """See `ConversationTable.remove_decoder`."""
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
                    # It may have been spared for its turn.
                    self._idleness.watch(history)
                unbound.append(history.id)
        self._engines.remove_decoder(decoder_id)
        return unbound
