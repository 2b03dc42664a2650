"""The table of live conversations: binds histories to decoders, and has others make room."""

import copy
from collections.abc import Iterable
from dataclasses import replace
from math import inf

from conserve.conversations.turns import Turns
from conserve.hints import Hints
from conserve.histories.kinship import Opening
from conserve.histories.prefixes import held_alone
from conserve.history import History
from conserve.placement import NOTHING_SHARED, Coming, Decoder, Placement, Shared
from conserve.turn import TurnKey

# A turn for which a decoder makes no room is not tried on all others.
_TRIED = 2
# A shorter beginning is computed in less time than it takes to leave it in host memory.
_LENT_TOKENS = 512
# For the process that keeps a table: finding and freeing conversations' scattered objects on pages
# of 4 KB takes mostly address translation. Python's own allocator cannot ask for huge pages,
# glibc's (2.35 and later) can. It costs 140 bytes a conversation.
MEMORY_ENVIRONMENT = {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


class ConversationTable(Turns):
    """Bindings of live conversations to decoders.

    A history's life: `bind` (its first turn starts), `prefilled`, `advance` (the turn is complete),
    then `begin` and `advance` for each later turn, and `release`. `abandon` ends a turn that did
    not complete. When a decoder is lost, its histories stay, unbound, and their next turns bind
    again. Ending a turn twice changes nothing.

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
        *,
        adapter: str = "",
    ) -> History | None:
        """Start a turn of a bound history; None if it is unbound, or the turn costs less elsewhere.

        Then the history has been paused, for `bind` to place.

        Args:
            prompt_tokens: None if not known: as many as the history holds.
            encode_tokens: embeddings of its images that are not encoded yet.
            adapter: its adapter's id; empty: it has none.
        """
        known, memory = self._by_id.get(history_id), self.memory
        if known is not None and memory is not None and known.home and not known.running:
            prompt = Shared(
                {}, encode_tokens=encode_tokens, background=known.background, adapter=adapter
            )
            shared = memory.found(history_id, prompt)
            costs = self._turn_costs(prompt_tokens or known.held_tokens, shared, now_s)
            least_s = min((cost_s for cost_s, _ in costs.values()), default=inf)
            if least_s < costs.get(known.home, (0.0, None))[0]:
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
        waited_s = None
        if known is not None:
            waited_s = 0.0 if arrived_s is None else now_s - arrived_s
        placement: Placement | None = None
        costs = self._turn_costs(prompt_tokens, shared, now_s)
        for id in sorted(costs, key=lambda id: costs[id][0])[:_TRIED]:
            one = self._engines.decoders[id]
            if one.has_room(shared.beyond(prompt_tokens, one.id)) or self._make_room(
                history_id, prompt_tokens, shared, now_s, waited_s, opening, decoders=[one]
            ):
                placement = Placement(id, None, costs[id][1])
                break
        if placement is None:
            placement = self.policy.place(prompt_tokens, decoders, prefillers, shared, now_s)
        while placement is None and self._make_room(
            history_id, prompt_tokens, shared, now_s, waited_s, opening
        ):
            # What was shared with the evicted histories is gone.
            shared = self._shared(known, history_id, opening)
            placement = self.policy.place(prompt_tokens, decoders, prefillers, shared, now_s)
        if placement is None:
            return None
        usage = self._ledger.usage.of(history_id)
        was_known = known is not None
        unbound = self._ledger.without_engine.get(history_id)
        if unbound is None and self.memory is not None and self.memory.paused_on(history_id):
            elsewhere = shared.left_tokens > 0 and placement.decoder_id != shared.left_on
            unbound = "moved" if elsewhere else "paused"
        if known is None:
            known = History(history_id, self._next_id, now_s, now_s)
            known.asked_s = now_s if arrived_s is None else arrived_s
            known.root = opening.root
            known.hints = opening.hints
            known.adapter = opening.adapter
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
        broken = None
        if not was_known:
            broken = self._kinship.broken(known.id, opening, self._live.siblings)
            if opening.follows_answers and not self._live.siblings(known.id):
                unbound = "unknown"
        if placement.prefiller_id is not None:
            self._engines.join_queue(known, placement.prefiller_id, prompt_tokens)
        self._kinship.opened(known, opening, waits=placement.after is not None)
        known.promised = True
        if self.loads is not None:
            self.loads.placed(known.id, prompt_tokens, placement, shared, now_s)
        self._start(known, usage, now_s, arrived_s, unbound=unbound, broken=broken)
        self._lend(known, placement, shared, opening.system_tokens)
        return placement

    def _lend(
        self, history: History, placement: Placement, shared: Shared, system_tokens: int
    ) -> None:
        """Have a first prompt left in host memory, if its beginning is not there.

        Others with this beginning can go to other engines then. It takes others' room there only if
        it has such a beginning, and not only a system part of its own.
        """
        memory, most = self.memory, max(shared.tokens.values(), default=0)
        if memory is None or shared.coming or 2 * shared.parked_tokens > most:
            return
        if placement.prefiller_id is None:
            lends = max(most, system_tokens if memory.has_host_room else 0) >= _LENT_TOKENS
            if lends and len(self._engines.accepting_decoders) > 1:
                memory.parks_turn(history.running[-1])
            if not memory.park(history):
                return
        self._kinship.lends(history)

    def held(self, opening: Opening) -> int:
        shared = self._kinship.shared(opening, self._engines.accepting_decoders)
        return max(shared.tokens.values(), default=0)

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
        if self.memory is not None and self._kinship.has_any(opening):
            shared = self.memory.lent(self._kinship.lenders(opening, history_id), shared)
        if opening.encode_tokens or opening.background or opening.adapter:
            shared = replace(
                shared, encode_tokens=opening.encode_tokens, background=opening.background,
                adapter=opening.adapter,
            )  # fmt: skip
        return shared

    def _make_room(
        self,
        history_id: str,
        prompt_tokens: int,
        shared: Shared,
        now_s: float,
        waited_s: float | None,
        opening: Opening,
        *,
        decoders: list[Decoder] | None = None,
    ) -> bool:
        """Pause idle histories so that a prompt fits, on any or some decoders; say if so."""
        engines = self._engines
        decoders = decoders or self.policy.homes(
            engines.accepting_decoders, engines.accepting_prefillers, now_s
        )
        memory = self.memory
        if memory is not None and memory.make_room(
            prompt_tokens, decoders, shared, now_s, waited_s=waited_s,
            root=opening.root,
            any_runs=self._ledger.reasoning > 0,
            background=opening.background,
            leads=self.leads(history_id, prompt_tokens),
        ):  # fmt: skip
            return True
        # Else a conversation that was compacted would wait for itself. Clients do not say which
        # history they have left for a new one: it is clear if only one is idle and in the way.
        in_the_way = [
            one
            for one in self._live.siblings(history_id)
            if one.home is not None
            and not one.running
            and _fits_without(one, prompt_tokens, decoders)
        ]
        if len(in_the_way) != 1:
            return False
        if memory is not None:
            memory.pause(in_the_way[0], "room")
        else:
            self._displaced += in_the_way
            self.release(in_the_way[0].id)
        return True

    def _turn_costs(
        self, prompt_tokens: int, shared: Shared, now_s: float
    ) -> dict[str, tuple[float, Coming | None]]:
        """Return what the turn costs at each decoder; empty if histories stay where they began."""
        if self.memory is None or not self.memory.keeps:
            return {}
        decoders = self._engines.accepting_decoders
        return self.policy.turn_costs(prompt_tokens, decoders, shared, now_s)

    # --- what others ask, and what turns leave ------------------------------------------------

    def engine_joined(
        self, engine_id: str, kind: str, handoffs: Iterable[tuple[int, float]] = ()
    ) -> None:
        if self.loads is not None:
            self.loads.joined(engine_id, kind, tuple(handoffs))

    def park(self, history: History) -> bool:
        return self.memory is not None and self.memory.park(history)

    def prefetch(self, history: History, due_s: float) -> None:
        """Bring a paused history back to its decoder for a turn that is due, if there is room."""
        if self.memory is not None and (decoder_id := self.memory.brings_back_to(history)):
            self._take_back(history, decoder_id)
            self.memory.prefetched(history, due_s)
            self._ledger.notices.prefetch(decoder_id, history.id)

    def child_ended(self, history_id: str, now_s: float) -> None:
        """Bring back what waited for a history alone, whose turn has ended, if it is done."""
        history = self._by_id.get(history_id)
        if history is not None and (parent := self.parents.done(history)) is not None:
            self.prefetch(parent, now_s)

    def prefetched(self, history_id: str, tokens: int, now_s: float) -> None:
        """Note that a decoder has so much of a history that it was told to load."""
        memory = self.memory
        if memory is not None and memory.prefetches.loaded(history_id, now_s):
            if 2 * tokens >= (history := self._by_id[history_id]).last_tokens:
                memory.used(history)
            else:
                memory.give_back(history)

    def prefetch_due(self, now_s: float, any_waits: bool) -> None:
        """Bring back what clients expect to go on with, and give up room for what has not come.

        ``any_waits``: whether turns wait for room, so that nothing is brought back.
        """
        if self.memory is None:
            return
        for history_id in self.memory.prefetches.overdue(now_s):
            self.memory.give_back(self._by_id[history_id])
        for history_id, due_s in self.memory.prefetches.due(now_s):
            history = self._by_id.get(history_id)
            # Another turn may have ended since.
            if not any_waits and history is not None and history.due_s == due_s:
                self.prefetch(history, due_s)

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
            self._ledger.inherit(history)
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
        self._engines.decoders[decoder_id].evicting = True
        idle = [
            history
            for history in self._by_id.values()
            if history.home == decoder_id and not history.running
        ]
        for history in idle:
            self._ledger.unbind(history)
        return [history.id for history in idle]

    def remove_engine(self, engine_id: str) -> list[str]:
        """Remove an engine that is lost, end its turns, and return the ids of its histories."""
        self._ledger.notices.remove(engine_id)
        if self.memory is not None and engine_id in self._engines.decoders:
            self.memory.decoder_lost(engine_id)
        unbound = []
        for history in self._by_id.values():
            if history.prefiller_id == engine_id:
                self._engines.leave_queue(history)
            if history.home == engine_id:
                running = history.running
                self._ledger.lose(history)
                if running:
                    if self.memory is not None:
                        self.memory.turns_lost(history.id, running)
                    # It may have been kept for its running turn.
                    self._idleness.watch(history)
                unbound.append(history.id)
        self._engines.remove(engine_id)
        return unbound


def _fits_without(history: History, tokens: int, decoders: list[Decoder]) -> bool:
    decoder = next((one for one in decoders if one.id == history.home), None)
    return decoder is not None and tokens <= decoder.free_tokens + held_alone(history)
