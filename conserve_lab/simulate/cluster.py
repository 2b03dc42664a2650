"""A simulated cluster: the live system's policies and ledger, over simulated engines.

Placement (`conserve.placement`), the account of what decoders hold (`ConversationTable`) and
admission with its queue (`conserve.admission.Admission`) are the live system's classes. Engines,
handoffs and clients are simulated. Engines do not fail.
"""

import math
import random
from collections import defaultdict
from hashlib import blake2b
from itertools import chain
from typing import Any

import msgspec

from conserve import identity
from conserve.admission import Admission, Admitted, QueueFull, Ticket
from conserve.conversations import ConversationTable
from conserve.costs import TERMS, SpaceTimeCosts
from conserve.direct import LARGE_TOKENS
from conserve.histories.kinship import Opening
from conserve.placement import Step, make_policy
from conserve.policies import room_policies
from conserve.recognition import Chain
from conserve.turn import TurnKey, TurnStats
from conserve_lab.counters import ServerFigures
from conserve_lab.records import SharedPrefix
from conserve_lab.simulate.clients import Clients, Open
from conserve_lab.simulate.engine import EngineTurn, SimulatedEngine
from conserve_lab.simulate.system import System

# None of the clients is idle for longer than its gaps, and no turn is lost.
_NEVER_S = 1e12
# As often as the live table looks after its line, whatever happens.
_LOOK_S = 1.0
_NOISE_SEED = 31
# Engines try at their start how long handing over takes, with prompts of these lengths.
_TRIED_TOKENS = (512, 4_096)


class Cluster(Clients):
    """A run of one system that is built as ConServe is."""

    def _engine(self, *given: Any, **more: Any) -> SimulatedEngine:
        return super()._engine(*given, prefilled=self._stored, **more)

    def _prepare(self, system: System) -> None:
        costs = system.decoders[0].estimated
        policy = make_policy(system.placement, system.wrong_decision_rate, costs)
        pausing, order, window = room_policies(system.queue_timeout_s, pauses=system.pausing)
        self.table = ConversationTable(policy, _NEVER_S, pausing=pausing)
        if self.table.memory is not None:
            self.table.memory.set_host_tokens(system.host_tokens)
        self._admission = Admission(
            self.table, system.queue_limit, system.queue_timeout_s, order, window
        )
        self._looks = False
        self._in_line: dict[str, tuple[Open, Ticket]] = {}
        # By conversation, those that wait for its prefill.
        self._after: defaultdict[str, list[Open]] = defaultdict(list)
        self.decoders = {
            (name := f"decoder-{i}"): self._engine(name, costs, self._answered)
            for i, costs in enumerate(system.decoders)
        }
        self.prefillers = {
            (name := f"prefiller-{i}"): self._engine(
                name, costs, self._prefilled, keeps=system.history == "kept"
            )
            for i, costs in enumerate(system.prefillers)
        }
        # Where conversations may live: under some placements prefillers host them, too.
        self._homes = dict(self.decoders)
        if self.table.loads is not None:
            self._homes |= self.prefillers
        self._kv_costs = SpaceTimeCosts()
        for name, engine in self._homes.items():
            self._hosts(name, engine, 0.0)
        for name in self.prefillers:
            self.table.add_prefiller(name)
        self._tells = False
        self._noise = random.Random(_NOISE_SEED)
        self._handoffs = self._handoff_tokens = 0
        self._later_prefills = self._cold_prefill_tokens = 0

    def _hosts(self, name: str, engine: SimulatedEngine, now_s: float) -> None:
        """Add an engine where conversations may live."""
        self._homes[name] = engine
        self.table.add_decoder(name, engine.costs.capacity_tokens)
        self._kv_costs.add(name, engine.costs.capacity_tokens, now_s)
        if self.table.loads is not None:
            # Engines of one role are taken to be of one kind.
            tried = [(tokens, engine.costs.handoff(tokens)) for tokens in _TRIED_TOKENS]
            self.table.loads.joined(name, name.split("-")[0], tried)

    def figures(self, kv_bytes_per_token: float) -> ServerFigures:
        tokens = self._handoff_tokens + self._loaded_tokens
        return ServerFigures(
            handoffs=self._handoffs,
            handoff_tokens=tokens,
            handoff_tokens_per_conversation=tokens / self.arrived if self.arrived else None,
            handoff_bytes=tokens * kv_bytes_per_token,
            later_prefills=self._later_prefills,
            moves=0 if self.table.memory is None else self.table.memory.restores["moved"],
            cold_prefill_tokens=self._cold_prefill_tokens,
            kv_shares=self._kv_shares(),
            shared_found_tokens=self.shared_found_tokens(),
        )

    def _serve(self, one: Open, prompt_tokens: int, now_s: float) -> None:
        one.found_tokens = one.prefilled_tokens = 0
        self._tell_again(now_s)
        if one.decoder is None:
            self._place(one, prompt_tokens, now_s)
            return
        known = self.table.get(one.script.conversation)
        assert known is not None
        counted = None
        if self.system.host_tokens and prompt_tokens - known.held_tokens >= LARGE_TOKENS:
            counted = prompt_tokens
        conversation = self.table.begin(known.id, now_s, prompt_tokens=counted)
        if conversation is None:
            # It was paused, or moves.
            one.decoder = None
            self._place(one, prompt_tokens, now_s)
            return
        one.key = conversation.newest_turn
        self._count_turn(one.key, now_s)
        prefiller_id = self.table.prefill_later_turn(conversation)
        if prefiller_id is None:
            self._submit_to_decoder(one, now_s)
            return
        self._later_prefills += 1
        self._prefill_later(one, self.prefillers[prefiller_id], now_s)

    def _tell_again(self, now_s: float) -> None:
        if self.table.loads is not None and not self._tells:
            self._tells = True
            self._later(now_s + self.system.stale_s, self._tell, None)

    def _tell(self, now_s: float, _: None) -> None:
        self._tells = False
        for name, engine in {**self.decoders, **self.prefillers}.items():
            steps = tuple(self._noisy(step) for step in engine.take_steps())
            said = msgspec.structs.replace(engine.load, steps=steps)
            self.table.engine_says(name, said, now_s)
        if self._under_way:
            self._tell_again(now_s)

    def _noisy(self, step: Step) -> Step:
        off = math.exp(self._noise.gauss(0.0, self.system.noise))
        return msgspec.structs.replace(step, lasted_s=off * step.lasted_s)

    # --- KV space ------------------------------------------------------------------------------

    def _count_kv(self, now_s: float) -> None:
        for decoder_id, decoder in self.table.decoders.items():
            self._kv_costs.look(decoder_id, decoder.held_tokens, now_s)

    def _count_turn(self, turn: TurnKey, now_s: float) -> None:
        history = self.table.get(turn.history_id)
        assert history is not None
        assert history.home is not None
        self._count_kv(now_s)
        tokens, had_tokens = history.held_tokens, history.last_tokens
        self._kv_costs.begin(turn, history.home, tokens, had_tokens, now_s)

    def _kv_shares(self) -> dict[str, float]:
        """Return each term's share of all decoders' KV space until the end; empty of no time."""
        self._count_kv(self.ended_s)
        of_decoders = [self._kv_costs.terms(id) for id in self._kv_costs.decoders]
        total = math.fsum(math.fsum(terms.values()) for terms in of_decoders)
        if not total:
            return {}
        return {term: math.fsum(one[term] for one in of_decoders) / total for term in TERMS}

    # --- Placement ----------------------------------------------------------------------------

    def _place(self, one: Open, prompt_tokens: int, now_s: float) -> None:
        conversation = one.script.conversation
        begins = opening(conversation, one.request.shared, first=not one.records)
        weight = self.system.weights.get(identity.tenant_of(conversation) or "", 1)
        try:
            answer = self._admission.enter(
                conversation, prompt_tokens, now_s, opening=begins, weight=weight
            )
        except QueueFull as full:
            self._refuse(one, now_s, f"429: {full}")
            return
        if isinstance(answer, Ticket):
            self._in_line[conversation] = one, answer
            self._later(answer.deadline_s, self._give_up, answer)
            self._look_again(now_s)
        else:
            self._start(one, answer, now_s)

    def _start(self, one: Open, admitted: Admitted, now_s: float) -> None:
        placement = admitted.placement
        # Otherwise two scripts have one id.
        assert admitted.newly_bound, admitted.history.id
        one.key = admitted.turn
        one.decoder = self._homes[placement.decoder_id]
        self._count_turn(one.key, now_s)
        if placement.after is not None:
            self._after[placement.after.history_id].append(one)
        elif placement.prefiller_id is None:
            self._submit_to_decoder(one, now_s)
        else:
            self._cold_prefill_tokens += admitted.prompt_tokens
            prefiller = self.prefillers[placement.prefiller_id]
            # Who was paused has been here before.
            reusable = self._reusable(one) if one.records else 0
            work = EngineTurn(
                one.script.conversation,
                admitted.prompt_tokens,
                1,
                reusable,
                turn=one,
                shared=one.request.shared,
            )
            self._submit(work, prefiller, now_s, self.system.handed_off_s)

    def _admit(self, now_s: float, rested: str | None = None) -> None:
        for admitted in self._admission.admit(now_s, rested):
            one, _ = self._in_line.pop(admitted.history.id)
            self._start(one, admitted, now_s)

    def _look_again(self, now_s: float) -> None:
        """Look at the queue every second while there is one: the window opens by itself."""
        window = self._admission.window
        if window is not None and not self._looks:
            self._looks = True
            self._later(now_s + _LOOK_S, self._look, None)

    def _look(self, now_s: float, _: None) -> None:
        self._looks = False
        self._observe(now_s)
        self._admit(now_s)
        if self._admission.queue:
            self._look_again(now_s)

    def _observe(self, now_s: float) -> None:
        self._admission.observe(now_s)
        if (memory := self.table.memory) is not None:
            for id in chain.from_iterable(map(memory.take_touched, self._homes)):
                self._host.use(id, 0, now_s)

    def _give_up(self, now_s: float, ticket: Ticket) -> None:
        one, waits_with = self._in_line.get(ticket.history_id, (None, None))
        # It may have gone, and be back: a conversation that is paused waits more than once.
        if one is None or waits_with is not ticket:
            return
        del self._in_line[ticket.history_id]
        self._admission.leave(ticket.history_id)
        timeout_s = self.system.queue_timeout_s
        prompt = f"{ticket.prompt_tokens} tokens"
        self._refuse(one, now_s, f"429: no decoder had room for {prompt} in {timeout_s:g} s")
        self._admit(now_s)

    # --- Prefills and handoffs ----------------------------------------------------------------

    def _work(self, one: Open) -> EngineTurn:
        request = one.request
        return EngineTurn(
            one.script.conversation,
            request.prompt_tokens or 0,
            request.output_tokens or 0,
            self._reusable(one),
            turn=one,
            shared=request.shared,
        )

    def _submit_to_decoder(self, one: Open, now_s: float) -> None:
        """Send a turn to its decoder, which takes what it has dropped from host memory."""
        decoder = one.decoder
        assert decoder is not None
        work = self._work(one)
        after_s = self.system.direct_s + self._load(one, work, decoder, now_s) - now_s
        one.parks = self._parks(one)
        self._submit(work, decoder, now_s, after_s)

    def _parks(self, one: Open) -> bool:
        conversation = self.table.get(one.script.conversation)
        assert conversation is not None
        return self.table.park(conversation)

    def _stored(self, work: EngineTurn, now_s: float) -> None:
        """Have those begin that waited for a first prompt, which is in host memory now."""
        one: Open = work.turn
        if one.parks and not one.records:
            self.table.prefilled(one.key, work.prompt_tokens)
            self._keep_in_host(one, work.prompt_tokens, now_s)
        for other in self._after.pop(work.conversation, ()):
            self.table.has_waited(other.key)
            self._later(now_s, lambda at_s, other: self._submit_to_decoder(other, at_s), other)

    def _keep_in_host(self, one: Open, tokens: int, now_s: float) -> None:
        if self.system.host_tokens:
            history = self.table.get(one.script.conversation)
            self._leave(one, tokens, now_s, 0 if history is None else history.shared_tokens)

    def _prefill_later(self, one: Open, prefiller: SimulatedEngine, now_s: float) -> None:
        work = EngineTurn(
            one.script.conversation,
            one.request.prompt_tokens or 0,
            1,
            turn=one,
            shared=one.request.shared,
        )
        if self.system.history == "recomputed":
            self._submit(work, prefiller, now_s, self.system.handed_off_s)
            return
        brought = work.reusable_tokens = self._reusable(one)
        if self.system.host_tokens:
            brought = min(brought, self._host.left_tokens(work.conversation))
        work.loaded_tokens = self._whole_chunks(brought)
        moved = max(0, work.loaded_tokens - prefiller.finds(work))
        self._loaded_tokens += moved
        self._move(work, prefiller, moved, now_s, self.system.handed_off_s)

    def _prefilled(self, work: EngineTurn, prefiller: SimulatedEngine, now_s: float) -> None:
        """Hand the KV of a prefilled turn to the conversation's decoder."""
        one: Open = work.turn
        assert one.decoder is not None
        if prefiller is one.decoder:
            # It hosts the conversation.
            self._answered(work, prefiller, now_s)
            return
        self.table.prefilled(one.key, work.prompt_tokens)
        one.prefilled_tokens, one.found_tokens = work.prompt_tokens, work.cached_tokens
        to_decode = self._work(one)
        to_decode.loaded_tokens = self._whole_chunks(work.prompt_tokens)
        self._keep_in_host(one, work.prompt_tokens, now_s)
        one.parks = self._parks(one)
        moved = max(0, to_decode.loaded_tokens - one.decoder.finds(to_decode))
        if moved:
            self._handoffs += 1
            self._handoff_tokens += moved
        self._move(to_decode, one.decoder, moved, now_s)

    def _move(
        self,
        work: EngineTurn,
        engine: SimulatedEngine,
        tokens: int,
        now_s: float,
        after_s: float = 0.0,
    ) -> None:
        takes_s = engine.costs.handoff(tokens)
        if self.system.transfers_block:
            work.load_s = takes_s
            takes_s = 0.0
        self._submit(work, engine, now_s, after_s + takes_s)

    # --- Ends ---------------------------------------------------------------------------------

    def _answered(self, work: EngineTurn, decoder: SimulatedEngine, now_s: float) -> None:
        one: Open = work.turn
        id = work.conversation
        stats = TurnStats(
            work.prompt_tokens,
            work.output_tokens,
            work.cached_tokens,
            work.loaded_tokens,
            one.request.tool,
            None if work.first_token_s is None else now_s - work.first_token_s,
            prefilled_tokens=one.prefilled_tokens,
            prefiller_cached_tokens=one.found_tokens,
        )
        self._kv_costs.end(one.key, stats, now_s)
        self.table.advance(one.key, decoder.id, stats, (), now_s)
        self._admission.queue.served(id, stats.computed_tokens)
        if one.parks:
            self._keep_in_host(one, work.prompt_tokens, now_s)
        if self.table.memory is not None:
            decoders = self.table.decoders
            self.table.memory.relieve(decoders[decoder.id], decoders.values(), now_s)
        self._count_kv(now_s)
        self._completed(one, work, decoder.id, now_s, one.found_tokens)
        self._observe(now_s)
        if self._admission.queue:
            self._admit(now_s, id)

    def _refuse(self, one: Open, now_s: float, error: str) -> None:
        super()._refuse(one, now_s, error)
        if self._admission.queue:
            self._admit(now_s)

    def _closed(self, one: Open, now_s: float) -> None:
        id = one.script.conversation
        self.table.release(id)
        self._count_kv(now_s)
        if one.decoder is not None and not self.system.keeps_ended:
            one.decoder.forget(id)


def opening(conversation: str, shared: tuple[SharedPrefix, ...], first: bool) -> Opening | None:
    """Return what the live system would know of a prompt that begins so; None: it shares nothing.

    Tools and system messages are one part there, the longest prefix of these.
    """
    if not shared:
        return None
    whole = shared[-1]
    chain = Chain(_digest(conversation), _digest(*whole), (), ends_with_root=first)
    return Opening(chain, whole.tokens)


def _digest(*what: str | int) -> bytes:
    return blake2b(repr(what).encode(), digest_size=16).digest()
