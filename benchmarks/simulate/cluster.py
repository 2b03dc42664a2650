"""A simulated cluster: the live system's policies and ledger, over simulated engines.

Where a conversation goes, and where a turn is prefilled, is decided by the same classes as in the
live system: a policy of `conserve.placement`, `conserve.conversations.ConversationTable` with its
account of what decoders hold, and `conserve.admission.Admission` with its waiting line. What is
simulated is the rest: engines (`benchmarks.simulate.engine`), handoffs and clients.

Not simulated: prefixes that different conversations share, and engines that fail.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import Any, Literal

from benchmarks.counters import ServerFigures
from benchmarks.records import Answer, Script, TurnRecord, TurnRequest
from benchmarks.simulate.costs import Costs
from benchmarks.simulate.engine import EngineTurn, SimulatedEngine
from benchmarks.simulate.kv_use import KvUse
from conserve.admission import Admission, Admitted, QueueFull, Ticket
from conserve.conversation import TurnKey, TurnStats
from conserve.conversations import ConversationTable
from conserve.pausing import Pausing
from conserve.pausing.host import HostMemory
from conserve.placement import PolicyName, make_policy

History = Literal["kept", "moved", "recomputed"]

# None of the clients is idle for longer than its gaps, and no turn is lost.
_NEVER_S = 1e12
_NOTHING_SAID = Answer("")


class SimulationError(ValueError):
    """This cannot be simulated; the message says why, in one line."""


@dataclass(frozen=True, slots=True)
class System:
    """What is simulated.

    Attributes:
        prefillers, decoders: the costs of each.
        placement, wrong_decision_rate, min_remote_prefill_tokens, queue_limit, queue_timeout_s: as
            in `conserve.settings.Settings`.
        history: how a prefiller that prefills a later turn gets the turn's history. ``kept``: it
            finds it in its own cache, and the rest is brought from the decoder, as in the live
            system; ``moved``: it is brought from the decoder each time; ``recomputed``: it is
            computed again with the whole prompt.
        transfers_block: whether the engine that takes KV over waits for it within a step, as with a
            connector that loads synchronously; else its other turns go on meanwhile.
        direct_s, handed_off_s: what a turn takes beside its engines, as in
            `autoscale.capacity.profile.Overhead`; it passes before the turn gets to the first.
        handoff_chunk_tokens: length of a chunk; only whole chunks are handed off.
        max_sequences, block_tokens: each engine's, as in `SimulatedEngine`.
        pausing: whether idle conversations give up their room, as in `Settings`.
        host_tokens: room for KV in host memory; 0: none is kept there, but while it is handed off.
    """

    name: str
    placement: PolicyName
    prefillers: tuple[Costs, ...]
    decoders: tuple[Costs, ...]
    wrong_decision_rate: float = 0.0
    min_remote_prefill_tokens: int = 0
    history: History = "kept"
    transfers_block: bool = False
    direct_s: float = 0.0
    handed_off_s: float = 0.0
    handoff_chunk_tokens: int = 256
    max_sequences: int = 256
    block_tokens: int = 16
    queue_limit: int = 1024
    queue_timeout_s: float = 60.0
    pausing: bool = False
    host_tokens: int = 0


class _Open:
    """A conversation under way."""

    __slots__ = (
        "decoder", "found_tokens", "key", "parks", "records", "request", "script", "sent_s",
    )  # fmt: skip

    def __init__(self, script: Script, request: TurnRequest) -> None:
        self.script = script
        self.request = request
        self.records: list[TurnRecord] = []
        self.sent_s = 0.0
        self.decoder: SimulatedEngine | None = None
        # The table's key for the turn under way.
        self.key = TurnKey(script.conversation, 0, 0)
        # Tokens of the turn's prompt that were found in any cache.
        self.found_tokens = 0
        # Whether the turn under way leaves its KV in host memory.
        self.parks = False


class Cluster:
    """One run of one system.

    Args:
        on_conversation: called with the turns of each conversation, when it ends.
        gaps: whether gaps between turns are kept; False: turns follow each other at once.

    Attributes:
        ended_s: when the last conversation ended.
        arrived, turns: number of conversations that came, and of turns that are over.
    """

    def __init__(
        self,
        system: System,
        on_conversation: Callable[[list[TurnRecord]], None],
        *,
        gaps: bool = True,
    ) -> None:
        self.system = system
        self._on_conversation = on_conversation
        self._gaps = gaps
        policy = make_policy(
            system.placement,
            min_remote_prefill_tokens=system.min_remote_prefill_tokens,
            wrong_decision_rate=system.wrong_decision_rate,
        )
        pausing = Pausing() if system.pausing else None
        self.table = ConversationTable(policy, _NEVER_S, pausing=pausing)
        self._host = HostMemory(system.host_tokens)
        # Until when KV comes from host memory to a decoder: one history after the other.
        self._loads_until_s: dict[str, float] = {}
        if self.table.memory is not None:
            self.table.memory.set_host_tokens(system.host_tokens)
        self._admission = Admission(self.table, system.queue_limit, system.queue_timeout_s)
        self._in_line: dict[str, tuple[_Open, Ticket]] = {}
        self._events: list[tuple[float, int, Callable[[float, Any], None], Any]] = []
        self._number = count()
        self.ended_s = 0.0
        self.arrived = 0
        self.turns = 0
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
        for name, engine in self.decoders.items():
            self.table.add_decoder(name, engine.costs.capacity_tokens)
        for name in self.prefillers:
            self.table.add_prefiller(name)
        self._longest_tokens = min(
            costs.capacity_tokens for costs in (*system.prefillers, *system.decoders)
        )
        capacity_tokens = {name: one.costs.capacity_tokens for name, one in self.decoders.items()}
        self._kv_use = KvUse(self.table, capacity_tokens)
        self._handoffs = self._handoff_tokens = self._loaded_tokens = 0
        self._later_prefills = self._cold_prefill_tokens = 0

    def run(self, plan: Iterable[tuple[float, Script]]) -> None:
        """Serve all conversations to their ends.

        Args:
            plan: arrivals in seconds, ascending, and what arrives.

        Raises:
            SimulationError: a turn of it does not say how long it is.
        """
        self._next_arrival(iter(plan))
        events = self._events
        while events:
            now_s, _, act, what = heappop(events)
            act(now_s, what)

    def energy_j(self) -> float | None:
        """Energy used up to the last conversation's end; None if the profile has no power."""
        total_j = 0.0
        for engine in (*self.prefillers.values(), *self.decoders.values()):
            costs = engine.costs
            if costs.idle_w is None or costs.prefill_w is None or costs.decode_w is None:
                return None
            idle_s = self.ended_s - engine.busy_prefill_s - engine.busy_decode_s
            total_j += (
                costs.idle_w * idle_s
                + costs.prefill_w * engine.busy_prefill_s
                + costs.decode_w * engine.busy_decode_s
            )
        return total_j

    def figures(self, kv_bytes_per_token: float) -> ServerFigures:
        """What a live system would have counted."""
        tokens = self._handoff_tokens + self._loaded_tokens
        return ServerFigures(
            handoffs=self._handoffs,
            handoff_tokens=tokens,
            handoff_tokens_per_conversation=tokens / self.arrived if self.arrived else None,
            handoff_bytes=tokens * kv_bytes_per_token,
            later_prefills=self._later_prefills,
            moves=0 if self.table.memory is None else self.table.memory.restores["moved"],
            cold_prefill_tokens=self._cold_prefill_tokens,
            kv_shares=self._kv_use.shares(self.ended_s),
        )

    def _engine(
        self,
        name: str,
        costs: Costs,
        finished: Callable[[EngineTurn, SimulatedEngine, float], None],
        keeps: bool = True,
    ) -> SimulatedEngine:
        return SimulatedEngine(
            name,
            costs,
            self._schedule,
            finished,
            keeps=keeps,
            max_sequences=self.system.max_sequences,
            block_tokens=self.system.block_tokens,
        )

    def _schedule(self, at_s: float, engine: SimulatedEngine, version: int) -> None:
        heappush(self._events, (at_s, next(self._number), engine.wake, version))

    def _later(self, at_s: float, act: Callable[[float, Any], None], what: object) -> None:
        heappush(self._events, (at_s, next(self._number), act, what))

    # --- Clients ------------------------------------------------------------------------------

    def _next_arrival(self, plan: Iterator[tuple[float, Script]]) -> None:
        arriving = next(plan, None)
        if arriving is not None:
            at_s, script = arriving
            self._later(at_s, self._arrive, (script, plan))

    def _arrive(self, now_s: float, what: tuple[Script, Iterator[tuple[float, Script]]]) -> None:
        script, plan = what
        self._next_arrival(plan)
        request = script.next(None)
        if request is not None:
            self.arrived += 1
            self._later(now_s + self._gap_s(request), self._send, _Open(script, request))

    def _gap_s(self, request: TurnRequest) -> float:
        return request.gap_s if self._gaps else 0.0

    def _send(self, now_s: float, one: _Open) -> None:
        """Send a conversation's next turn."""
        one.sent_s = now_s
        request = one.request
        prompt_tokens, output_tokens = request.prompt_tokens, request.output_tokens
        if prompt_tokens is None or output_tokens is None:
            raise SimulationError(
                "the workload does not say how long its prompts and outputs are; "
                "simulate recorded or synthetic conversations"
            )
        if prompt_tokens + output_tokens > self._longest_tokens:
            self._refuse(
                one, now_s, f"400: engines hold no more than {self._longest_tokens} tokens"
            )
            return
        if one.decoder is None:
            self._place(one, prompt_tokens, now_s)
            return
        conversation = self.table.begin(one.script.conversation, now_s)
        if conversation is None:
            # It was paused.
            one.decoder = None
            self._place(one, prompt_tokens, now_s)
            return
        one.key = conversation.newest_turn
        self._kv_use.begin(one.key, now_s)
        prefiller_id = self.table.prefill_later_turn(conversation)
        if prefiller_id is None:
            self._submit_to_decoder(one, now_s)
            return
        self._later_prefills += 1
        self._prefill_later(one, self.prefillers[prefiller_id], now_s)

    # --- Placement ----------------------------------------------------------------------------

    def _place(self, one: _Open, turn1_tokens: int, now_s: float) -> None:
        conversation = one.script.conversation
        try:
            answer = self._admission.enter(conversation, turn1_tokens, now_s)
        except QueueFull as full:
            self._refuse(one, now_s, f"429: {full}")
            return
        if isinstance(answer, Ticket):
            self._in_line[conversation] = one, answer
            self._later(answer.deadline_s, self._give_up, answer)
        else:
            self._start(one, answer, now_s)

    def _start(self, one: _Open, admitted: Admitted, now_s: float) -> None:
        """Have the first turn prefilled where it was placed."""
        placement = admitted.placement
        # Otherwise two scripts have one id.
        assert admitted.newly_bound, admitted.conversation.id
        one.key = admitted.turn
        one.decoder = self.decoders[placement.decoder_id]
        self._kv_use.begin(one.key, now_s)
        if placement.prefiller_id is None:
            self._submit_to_decoder(one, now_s)
        else:
            self._cold_prefill_tokens += admitted.turn1_tokens
            prefiller = self.prefillers[placement.prefiller_id]
            # Who was paused has been here before.
            reusable = self._reusable(one) if one.records else 0
            work = EngineTurn(one.script.conversation, admitted.turn1_tokens, 1, reusable, turn=one)
            self._submit(work, prefiller, now_s, self.system.handed_off_s)

    def _admit(self, now_s: float) -> None:
        """Place those in line who fit now that somebody has left."""
        for admitted in self._admission.admit(now_s):
            one, _ = self._in_line.pop(admitted.conversation.id)
            self._start(one, admitted, now_s)

    def _give_up(self, now_s: float, ticket: Ticket) -> None:
        one, waits_with = self._in_line.get(ticket.key, (None, None))
        # It may have gone, and be back: a conversation that is paused waits more than once.
        if one is None or waits_with is not ticket:
            return
        del self._in_line[ticket.key]
        self._admission.leave(ticket.key)
        timeout_s = self.system.queue_timeout_s
        self._refuse(
            one, now_s, f"429: no decoder had room for {ticket.tokens} tokens in {timeout_s:g} s"
        )
        self._admit(now_s)

    # --- Prefills and handoffs ----------------------------------------------------------------

    def _work(self, one: _Open) -> EngineTurn:
        request = one.request
        return EngineTurn(
            one.script.conversation,
            request.prompt_tokens or 0,
            request.output_tokens or 0,
            self._reusable(one),
            turn=one,
        )

    def _submit_to_decoder(self, one: _Open, now_s: float) -> None:
        """Have a decoder answer a turn; what it has dropped it takes from host memory."""
        decoder = one.decoder
        assert decoder is not None
        work = self._work(one)
        after_s = self.system.direct_s
        there = min(self._host.left_tokens(work.conversation), work.reusable_tokens)
        here = min(decoder.holds(work.conversation), work.reusable_tokens)
        missing = self._whole_chunks(there) - here
        if missing >= self.system.handoff_chunk_tokens:
            work.loaded_tokens = self._whole_chunks(there)
            self._loaded_tokens += missing
            self._host.use(work.conversation, 0, now_s)
            begins_s = max(now_s, self._loads_until_s.get(decoder.id, now_s))
            ends_s = begins_s + decoder.costs.handoff(missing)
            self._loads_until_s[decoder.id] = ends_s
            after_s += ends_s - now_s
        one.parks = self._parks(one)
        self._submit(work, decoder, now_s, after_s)

    def _parks(self, one: _Open) -> bool:
        """Whether a turn that goes to its decoder now leaves its KV in host memory."""
        conversation = self.table.get(one.script.conversation)
        assert conversation is not None
        return self.table.park(conversation)

    def _keep_in_host(self, conversation_id: str, tokens: int, now_s: float) -> None:
        if self.system.host_tokens:
            self._host.use(conversation_id, self._whole_chunks(tokens), now_s)

    def _reusable(self, one: _Open) -> int:
        """Tokens that the prompt shares with the one before; all of that one, where not said."""
        if one.request.reused_tokens is not None:
            return one.request.reused_tokens
        return one.records[-1].prompt_tokens if one.records else 0

    def _whole_chunks(self, tokens: int) -> int:
        chunk = self.system.handoff_chunk_tokens
        return tokens // chunk * chunk

    def _prefill_later(self, one: _Open, prefiller: SimulatedEngine, now_s: float) -> None:
        """Prefill a later turn on a prefiller; its history is brought first, if there is any."""
        work = EngineTurn(one.script.conversation, one.request.prompt_tokens or 0, 1, turn=one)
        if self.system.history == "recomputed":
            self._submit(work, prefiller, now_s, self.system.handed_off_s)
            return
        work.reusable_tokens = self._reusable(one)
        work.loaded_tokens = self._whole_chunks(work.reusable_tokens)
        here = min(prefiller.holds(work.conversation), work.reusable_tokens)
        moved = max(0, work.loaded_tokens - here)
        self._loaded_tokens += moved
        self._move(work, prefiller, moved, now_s, self.system.handed_off_s)

    def _prefilled(self, work: EngineTurn, prefiller: SimulatedEngine, now_s: float) -> None:
        """A prefiller is done with a turn: the KV goes to the conversation's decoder."""
        one = work.turn
        assert isinstance(one, _Open)
        assert one.decoder is not None
        self.table.prefilled(one.key, work.prompt_tokens)
        self._kv_use.prefilled(one.key, work.prompt_tokens - work.cached_tokens)
        one.found_tokens = work.cached_tokens
        to_decode = self._work(one)
        to_decode.loaded_tokens = self._whole_chunks(work.prompt_tokens)
        self._keep_in_host(work.conversation, work.prompt_tokens, now_s)
        one.parks = self._parks(one)
        here = min(one.decoder.holds(work.conversation), to_decode.reusable_tokens)
        moved = max(0, to_decode.loaded_tokens - here)
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
        """Bring KV to an engine, for a turn that is to run there."""
        takes_s = engine.costs.handoff(tokens)
        if self.system.transfers_block:
            work.load_s = takes_s
            takes_s = 0.0
        self._submit(work, engine, now_s, after_s + takes_s)

    def _submit(
        self, work: EngineTurn, engine: SimulatedEngine, now_s: float, after_s: float
    ) -> None:
        """Give a turn to an engine after so many seconds."""
        if after_s:
            self._later(now_s + after_s, self._come, (work, engine))
        else:
            engine.submit(work, now_s)

    def _come(self, now_s: float, what: tuple[EngineTurn, SimulatedEngine]) -> None:
        work, engine = what
        engine.submit(work, now_s)

    # --- Ends ---------------------------------------------------------------------------------

    def _answered(self, work: EngineTurn, decoder: SimulatedEngine, now_s: float) -> None:
        """A decoder is done with a turn."""
        one = work.turn
        assert isinstance(one, _Open)
        id, request = work.conversation, one.request
        stats = TurnStats(
            work.prompt_tokens,
            work.output_tokens,
            work.cached_tokens,
            work.loaded_tokens,
            request.tool,
            None if work.first_token_s is None else now_s - work.first_token_s,
        )
        self._kv_use.end(one.key, stats, now_s)
        self.table.advance(one.key, decoder.id, stats, (), now_s)
        if one.parks:
            self._keep_in_host(id, work.prompt_tokens, now_s)
        if self.table.memory is not None:
            decoders = self.table.decoders
            self.table.memory.relieve(decoders[decoder.id], decoders.values(), now_s)
        self._kv_use.look(now_s)
        following = one.script.next(_NOTHING_SAID)
        one.records.append(
            TurnRecord(
                system=self.system.name,
                conversation=id,
                turn=len(one.records) + 1,
                planned_s=one.sent_s,
                sent_s=one.sent_s,
                ended_s=now_s,
                outcome="completed",
                first_token_s=work.first_token_s,
                last_token_s=now_s,
                effective=bool(request.effective),
                last=following is None,
                prompt_tokens=work.prompt_tokens,
                output_tokens=work.output_tokens,
                cached_tokens=max(work.cached_tokens, one.found_tokens),
                server=decoder.id,
                reused_tokens=request.reused_tokens,
            )
        )
        self.turns += 1
        if following is None:
            self._close(one, now_s)
        else:
            one.request = following
            one.found_tokens = 0
            self._later(now_s + self._gap_s(following), self._send, one)
        if self._admission.line:
            self._admit(now_s)

    def _refuse(self, one: _Open, now_s: float, error: str) -> None:
        """Have a turn fail, and its conversation with it."""
        one.records.append(
            TurnRecord(
                system=self.system.name,
                conversation=one.script.conversation,
                turn=len(one.records) + 1,
                planned_s=one.sent_s,
                sent_s=one.sent_s,
                ended_s=now_s,
                outcome="failed",
                error=error,
                prompt_tokens=one.request.prompt_tokens or 0,
                reused_tokens=one.request.reused_tokens,
            )
        )
        self.turns += 1
        self._close(one, now_s)
        if self._admission.line:
            self._admit(now_s)

    def _close(self, one: _Open, now_s: float) -> None:
        id = one.script.conversation
        self.ended_s = now_s
        self.table.release(id)
        self._kv_use.look(now_s)
        if one.decoder is not None:
            one.decoder.forget(id)
        self._on_conversation(one.records)
