"""Binds histories to decoders, and has others make room for them."""

from dataclasses import replace
from math import inf

from conserve.conversations.turns import Turns
from conserve.hints import Hints
from conserve.histories.kinship import Opening
from conserve.histories.sharing import held_alone
from conserve.history import History
from conserve.placement import NOTHING_SHARED, Decoder, Placement, Shared
from conserve.recognition import Digest

# A turn for which a decoder makes no room is not tried on all others.
_TRIED = 2


class Binding(Turns):
    """Asks the policy where histories go, and binds them there.

    Attributes:
        recomputed_tokens: tokens of paused histories' prompts that prefillers have computed again.
    """

    recomputed_tokens = 0

    def begin(
        self,
        history_id: str,
        now_s: float,
        hints: Hints | None = None,
        prompt_tokens: int | None = None,
        encode_tokens: int = 0,
    ) -> History | None:
        """Start a turn of a bound history; None if it is unbound, or the turn costs less elsewhere.

        Then the history has been paused, for `bind` to place.

        Args:
            prompt_tokens: None if not known: as many as the history holds.
            encode_tokens: embeddings of its images that are not encoded yet.
        """
        known, memory = self._by_id.get(history_id), self.memory
        if known is not None and memory is not None and known.home and not known.running:
            shared = memory.found(history_id, replace(NOTHING_SHARED, encode_tokens=encode_tokens))
            costs = self._turn_costs(prompt_tokens or known.held_tokens, shared, now_s)
            if min(costs.values(), default=inf) < costs.get(known.home, 0.0):
                memory.pause(known, "load")
                return None
        history = super().begin(history_id, now_s, hints)
        if history is not None and prompt_tokens is not None and self.loads is not None:
            self.loads.appended(history, prompt_tokens, now_s, encode_tokens)
        return history

    def prefill_later_turn(self, history: History) -> str | None:
        """Return the prefiller of the turn that has just begun; None means its decoder."""
        prefiller_id = self.policy.prefill_later_turn(self._engines.accepting_prefillers)
        if prefiller_id is not None:
            self._engines.leave_queue(history)
            self._engines.join_queue(history, prefiller_id, history.held_tokens)
        return prefiller_id

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
        known = self._by_id.get(history_id)
        if known is not None and known.home is not None:
            raise ValueError(f"conversation {history_id!r} is bound to {known.home}")
        opening = opening or Opening()
        shared = self._shared(known, history_id, opening)
        decoders = self._engines.accepting_decoders
        prefillers = self._engines.accepting_prefillers
        root = None if opening.chain is None else opening.chain.root
        waited_s = None
        if known is not None:
            waited_s = 0.0 if arrived_s is None else now_s - arrived_s
        placement: Placement | None = None
        costs = self._turn_costs(prompt_tokens, shared, now_s)
        for id in sorted(costs, key=costs.__getitem__)[:_TRIED]:
            one = self._engines.decoders[id]
            if one.has_room(shared.beyond(prompt_tokens, one.id)) or self._make_room(
                history_id, prompt_tokens, shared, now_s, waited_s, root, decoders=[one]
            ):
                placement = Placement(id, None)
                break
        if placement is None:
            placement = self.policy.place(prompt_tokens, decoders, prefillers, shared, now_s)
        while placement is None and self._make_room(
            history_id, prompt_tokens, shared, now_s, waited_s, root
        ):
            # What was shared with the evicted histories is gone.
            shared = self._shared(known, history_id, opening)
            placement = self.policy.place(prompt_tokens, decoders, prefillers, shared, now_s)
        if placement is None:
            return None
        usage = self._ledger.usage.of(history_id)
        was_known = known is not None
        unbound = self._ledger.without_engine(history_id)
        if unbound is None and self.memory is not None and self.memory.paused_on(history_id):
            elsewhere = shared.left_tokens > 0 and placement.decoder_id != shared.left_on
            unbound = "moved" if elsewhere else "paused"
        if known is None:
            known = History(history_id, self._next_id, now_s, now_s)
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
            if self.loads is not None:
                # A prompt of which the decoder has little may stay without a prefiller, too.
                kept = kept and 2 * shared.found(placement.decoder_id) >= prompt_tokens
            last = known.last_turn
            if last is not None and not kept:
                self.recomputed_tokens += min(
                    prompt_tokens, last.prompt_tokens + last.output_tokens
                )
            known.moves += self.memory is None or self.memory.bound(known, kept)
        broken = None if was_known else self._kinship.broken(known.id, opening, self._live.siblings)
        self._kinship.opened(known, opening)
        known.promised = True
        if placement.prefiller_id is not None:
            self._engines.join_queue(known, placement.prefiller_id, prompt_tokens)
        if self.loads is not None:
            self.loads.placed(known.id, prompt_tokens, placement, shared, now_s)
        self._start(known, usage, now_s, arrived_s, unbound=unbound, broken=broken)
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
        if self.memory is not None and known is not None:
            shared = self.memory.found(history_id, shared)
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
        *,
        decoders: list[Decoder] | None = None,
    ) -> bool:
        """Pause idle histories so that a prompt fits, on any or some decoders; say if so."""
        engines = self._engines
        decoders = decoders or self.policy.homes(
            engines.accepting_decoders, engines.accepting_prefillers, now_s
        )
        memory = self.memory
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

    def _turn_costs(self, prompt_tokens: int, shared: Shared, now_s: float) -> dict[str, float]:
        """Return what the turn costs at each decoder; empty if histories stay where they began."""
        if self.memory is None or not self.memory.keeps:
            return {}
        decoders = self._engines.accepting_decoders
        return self.policy.turn_costs(prompt_tokens, decoders, shared, now_s)

    def _displace(self, history_id: str, prompt_tokens: int, decoders: list[Decoder]) -> bool:
        """End what a conversation left behind, if that makes room for a new history of it."""
        in_the_way = self._in_the_way(history_id, prompt_tokens, decoders)
        if in_the_way is None:
            return False
        self._displaced.append(in_the_way)
        self.release(in_the_way.id)
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
            if one.home is not None
            and not one.running
            and _fits_without(one, prompt_tokens, decoders)
        ]
        return in_the_way[0] if len(in_the_way) == 1 else None


def _fits_without(history: History, tokens: int, decoders: list[Decoder]) -> bool:
    decoder = next((one for one in decoders if one.id == history.home), None)
    return decoder is not None and tokens <= decoder.free_tokens + held_alone(history)
