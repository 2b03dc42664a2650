"""Binds histories to decoders, and has others make room for them."""

from dataclasses import replace

from conserve.conversations.ending import Ending, Idleness
from conserve.conversations.engines import Engines
from conserve.conversations.ledger import Ledger
from conserve.conversations.turns import Turns
from conserve.histories.kinship import Opening
from conserve.histories.sharing import held_alone
from conserve.history import History
from conserve.pausing import Memory
from conserve.placement import (
    NOTHING_SHARED,
    Decoder,
    Placement,
    PlacementPolicy,
    Shared,
)
from conserve.recognition import Digest


class Binding:
    """Asks the policy where histories go, and binds them there."""

    def __init__(
        self,
        *,
        policy: PlacementPolicy,
        ledger: Ledger,
        engines: Engines,
        turns: Turns,
        ending: Ending,
        idleness: Idleness,
        memory: Memory | None,
    ) -> None:
        self._policy = policy
        self._ledger = ledger
        self._live = ledger.live
        self._kinship = ledger.live.kinship
        self._engines = engines
        self._loads = engines.loads
        self._turns = turns
        self._ending = ending
        self._idleness = idleness
        self._memory = memory
        self._displaced: list[History] = []
        self.recomputed_tokens = 0

    def bind(
        self,
        history_id: str,
        prompt_tokens: int,
        now_s: float,
        arrived_s: float | None = None,
        opening: Opening | None = None,
    ) -> Placement | None:
        """Start a turn of a history that is new or paused, or whose decoder was lost.

        Returns None while no decoder has room.

        Raises:
            ValueError: it is bound already; use `begin`.
        """
        known = self._live.by_id.get(history_id)
        if known is not None and known.decoder_id is not None:
            raise ValueError(f"conversation {history_id!r} is bound to {known.decoder_id}")
        opening = opening or Opening()
        shared = self._shared(known, history_id, opening)
        decoders = self._engines.accepting_decoders
        prefillers = self._engines.accepting_prefillers
        placement = self._policy.place(prompt_tokens, decoders, prefillers, shared, now_s)
        root = None if opening.chain is None else opening.chain.root
        waited_s = None
        if known is not None:
            waited_s = 0.0 if arrived_s is None else now_s - arrived_s
        while placement is None and self._make_room(
            history_id, prompt_tokens, shared, now_s, waited_s, root
        ):
            # What was shared with the evicted histories is gone.
            shared = self._shared(known, history_id, opening)
            placement = self._policy.place(prompt_tokens, decoders, prefillers, shared, now_s)
        if placement is None:
            return None
        usage = self._ledger.usage.of(history_id)
        was_known = known is not None
        unbound = self._ledger.without_engine(history_id)
        if unbound is None and self._memory is not None and self._memory.paused_on(history_id):
            unbound = "paused"
        if known is None:
            known = History(history_id, self._turns.next_id, now_s, now_s)
            known.asked_s = now_s if arrived_s is None else arrived_s
            if opening.chain is not None:
                known.root = opening.chain.root
            usage.began(now_s)
            self._ledger.add(known, usage)
            self._idleness.watch(known)
        else:
            # The prefill for the lost decoder may not have been reported as over.
            self._engines.leave_queue(known)
        if opening.hints is not None:
            known.hints = opening.hints
        self._ledger.bind(known, placement.decoder_id, prompt_tokens)
        if was_known:
            kept = placement.prefiller_id is None
            if self._loads is not None:
                # A prompt of which the decoder has little may stay without a prefiller, too.
                kept = kept and 2 * shared.found(placement.decoder_id) >= prompt_tokens
            last = known.last_turn
            if last is not None and not kept:
                self.recomputed_tokens += min(
                    prompt_tokens, last.prompt_tokens + last.output_tokens
                )
            known.moves += self._memory is None or self._memory.bound(known, kept)
        broken = None if was_known else self._kinship.broken(known.id, opening, self._live.siblings)
        self._kinship.opened(known, opening)
        known.promised = True
        if placement.prefiller_id is not None:
            self._engines.join_queue(known, placement.prefiller_id, prompt_tokens)
        if self._loads is not None:
            self._loads.placed(known.id, prompt_tokens, placement, shared, now_s)
        self._turns.start(known, usage, now_s, arrived_s, unbound=unbound, broken=broken)
        return placement

    def held(self, opening: Opening) -> int:
        return self._kinship.held(opening, self._engines.accepting_decoders)

    def take_displaced(self) -> list[History]:
        """Return the histories that `bind` has ended since, to make room for others of theirs."""
        displaced, self._displaced = self._displaced, []
        return displaced

    def _shared(self, known: History | None, history_id: str, opening: Opening) -> Shared:
        shared = NOTHING_SHARED
        if self._kinship.has_any(opening):
            decoders = self._engines.accepting_decoders
            shared = self._kinship.shared(opening, decoders, history_id, self._live.siblings)
        if self._memory is not None and known is not None:
            shared = self._memory.found(history_id, shared)
        if opening.encode_tokens:
            shared = replace(shared, encode_tokens=opening.encode_tokens)
        return shared

    def _make_room(
        self,
        history_id: str,
        prompt_tokens: int,
        shared: Shared,
        now_s: float,
        waited_s: float | None,
        root: Digest | None,
    ) -> bool:
        """Have idle histories make room for a prompt that fits nowhere; return whether any did."""
        decoders = self._policy.homes(
            self._engines.accepting_decoders, self._engines.accepting_prefillers, now_s
        )
        memory = self._memory
        if memory is None:
            return self._displace(history_id, prompt_tokens, decoders)
        any_runs = self._ledger.reasoning > 0
        if memory.make_room(
            prompt_tokens, decoders, shared, now_s, waited_s=waited_s, root=root, any_runs=any_runs
        ):
            return True
        # Else a conversation that was compacted would wait for itself.
        in_the_way = self._in_the_way(history_id, prompt_tokens, decoders)
        if in_the_way is not None:
            memory.pause(in_the_way, "room")
        return in_the_way is not None

    def _displace(self, history_id: str, prompt_tokens: int, decoders: list[Decoder]) -> bool:
        """End what a conversation left behind, if that makes room for a new history of it."""
        in_the_way = self._in_the_way(history_id, prompt_tokens, decoders)
        if in_the_way is None:
            return False
        self._displaced.append(in_the_way)
        self._ending.release(in_the_way.id)
        return True

    def _in_the_way(
        self, history_id: str, prompt_tokens: int, decoders: list[Decoder]
    ) -> History | None:
        """Return the history that a conversation has left for a new one, which fits nowhere else.

        Clients do not say so: it is clear if only one is idle and in the way.
        """
        in_the_way = [
            one
            for one in self._live.siblings(history_id)
            if one.decoder_id is not None
            and not one.running
            and _fits_without(one, prompt_tokens, decoders)
        ]
        return in_the_way[0] if len(in_the_way) == 1 else None


def _fits_without(history: History, tokens: int, decoders: list[Decoder]) -> bool:
    decoder = next((one for one in decoders if one.id == history.decoder_id), None)
    return decoder is not None and tokens <= decoder.free_tokens + held_alone(history)
