"""Clients and time of a simulation: the conversations under way, and all events."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count, islice
from math import inf
from typing import Any

from conserve.pausing.cache import HostMemory
from conserve.turn import TurnKey
from conserve_lab.counters import ServerFigures
from conserve_lab.records import Answer, Script, SharedPrefix, TurnRecord, TurnRequest
from conserve_lab.simulate.costs import Costs
from conserve_lab.simulate.engine import EngineTurn, SimulatedEngine
from conserve_lab.simulate.rivals import Program
from conserve_lab.simulate.system import SimulationError, System

_NOTHING_SAID = Answer("")


@dataclass(eq=False, slots=True)
class Open:
    """A conversation under way.

    Attributes:
        request: its turn under way, or the next one.
        program: what a rival sees of it.
        key: the conversation table's, for the turn under way.
        found_tokens: of the turn's prompt, found in any cache.
        prefilled_tokens: of that prompt, where a prefiller has it computed.
        parks: whether the turn under way leaves its KV in host memory.
    """

    script: Script
    request: TurnRequest
    program: Program
    key: TurnKey
    records: list[TurnRecord] = field(default_factory=list)
    sent_s: float = 0.0
    decoder: SimulatedEngine | None = None
    found_tokens: int = 0
    prefilled_tokens: int = 0
    parks: bool = False


class Clients(ABC):
    """One run of one system.

    A subclass serves turns (`_serve`), and tells when they are over (`_completed`, `_refuse`).
    Without ``gaps`` turns follow each other at once.

    Attributes:
        ended_s: when the last conversation ended.
        arrived, turns: number of conversations that came, and of turns that are over.
    """

    decoders: Mapping[str, SimulatedEngine]
    prefillers: Mapping[str, SimulatedEngine]

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
        self._events: list[tuple[float, int, Callable[[float, Any], None], Any]] = []
        self._number = count()
        self._under_way: dict[str, Open] = {}
        self._arriving = False
        # Of a closed loop: conversations that begin when others end.
        self._next_programs: Iterator[tuple[float, Script]] = iter(())
        self._host = HostMemory(system.host_tokens)
        # Until when KV comes from host memory to an engine: one history after the other.
        self._loads_until_s: dict[str, float] = {}
        # A conversation that left there what others begin with, too.
        self._lenders: dict[SharedPrefix, str] = {}
        self._loaded_tokens = 0
        self._longest_tokens = min(
            costs.capacity_tokens for costs in (*system.prefillers, *system.decoders)
        )
        self.ended_s = 0.0
        self.arrived = self.turns = 0
        self._prepare(system)

    @abstractmethod
    def _prepare(self, system: System) -> None:
        """Make the engines, and what decides about them."""

    def run(self, plan: Iterable[tuple[float, Script]]) -> None:
        """Serve a plan: arrivals in seconds, ascending; SimulationError: a turn does not say how
        long it is.
        """
        self.start(plan)
        self.advance(inf)

    def start(self, plan: Iterable[tuple[float, Script]]) -> None:
        """Have a plan's conversations arrive while time goes on (`advance`)."""
        self._next_arrival(iter(plan))

    def advance(self, until_s: float) -> None:
        """Run all events until then; raises what `run` raises."""
        events = self._events
        while events and events[0][0] <= until_s:
            now_s, _, act, what = heappop(events)
            act(now_s, what)

    @property
    def open(self) -> bool:
        """Whether a conversation is under way, or is still to arrive."""
        return bool(self._under_way) or self._arriving

    def run_programs(
        self,
        plan: Iterable[tuple[float, Script]],
        programs: int,
        until_s: float,
        ramp_s: float = 0.0,
    ) -> None:
        """Keep this many conversations of a plan under way: where one ends, the next begins.

        At ``until_s`` it tells how far they got. The first begin evenly over ``ramp_s``.
        """
        self._next_programs = iter(plan)
        for number, (_, script) in enumerate(islice(self._next_programs, programs)):
            self._later(ramp_s * number / programs, self._begin, script)
        self.advance(until_s)
        if self._events:
            self.ended_s = until_s
        for one in self._under_way.values():
            if one.records:
                self._on_conversation(one.records)

    def energy_j(self) -> float | None:
        """Energy up to the last conversation's end; None if the profile has no power."""
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

    def shared_found_tokens(self) -> int:
        """Tokens that engines did not compute because other conversations begin with them."""
        engines = (*self.prefillers.values(), *self.decoders.values())
        return sum(engine.shared_found_tokens for engine in engines)

    @abstractmethod
    def figures(self, kv_bytes_per_token: float) -> ServerFigures: ...

    @abstractmethod
    def _serve(self, one: Open, prompt_tokens: int, now_s: float) -> None: ...

    @abstractmethod
    def _closed(self, one: Open, now_s: float) -> None: ...

    # --- Time ---------------------------------------------------------------------------------

    def _later(self, at_s: float, act: Callable[[float, Any], None], what: object) -> None:
        heappush(self._events, (at_s, next(self._number), act, what))

    def _schedule(self, at_s: float, engine: SimulatedEngine, version: int) -> None:
        heappush(self._events, (at_s, next(self._number), engine.wake, version))

    def _engine(
        self,
        name: str,
        costs: Costs,
        finished: Callable[[EngineTurn, SimulatedEngine, float], None],
        **more: Any,
    ) -> SimulatedEngine:
        return SimulatedEngine(
            name,
            costs,
            self._schedule,
            finished,
            max_sequences=self.system.max_sequences,
            block_tokens=self.system.block_tokens,
            **more,
        )

    def _submit(
        self, work: EngineTurn, engine: SimulatedEngine, now_s: float, after_s: float
    ) -> None:
        if after_s:
            self._later(now_s + after_s, lambda at_s, _: engine.submit(work, at_s), None)
        else:
            engine.submit(work, now_s)

    # --- Host memory --------------------------------------------------------------------------

    def _whole_chunks(self, tokens: int) -> int:
        chunk = self.system.handoff_chunk_tokens
        return tokens // chunk * chunk

    def _leave(self, one: Open, tokens: int, now_s: float, shared_tokens: int) -> None:
        """Leave a prompt in host memory, and what others begin with among it."""
        id, shared = one.script.conversation, one.request.shared
        self._host.use(id, self._whole_chunks(tokens), now_s, shared_tokens)
        if shared and not self._host.left_tokens(self._lenders.get(shared[-1], "")):
            self._lenders[shared[-1]] = id

    def _load(self, one: Open, work: EngineTurn, engine: SimulatedEngine, now_s: float) -> float:
        """Load what an engine lacks of a prompt from host memory; returns when that is done."""
        there = min(self._host.left_tokens(work.conversation), work.reusable_tokens)
        if one.request.shared:
            prefix = one.request.shared[-1]
            lent_tokens = self._host.left_tokens(self._lenders.get(prefix, ""))
            there = max(there, min(lent_tokens, prefix.tokens))
        missing = self._whole_chunks(there) - engine.finds(work)
        if missing < self.system.handoff_chunk_tokens:
            return now_s
        work.loaded_tokens = one.found_tokens = self._whole_chunks(there)
        self._loaded_tokens += missing
        if work.conversation in self._host:
            self._host.use(work.conversation, 0, now_s)
        begins_s = max(now_s, self._loads_until_s.get(engine.id, now_s))
        ends_s = self._loads_until_s[engine.id] = begins_s + engine.costs.handoff(missing)
        return ends_s

    # --- Clients ------------------------------------------------------------------------------

    def _next_arrival(self, plan: Iterator[tuple[float, Script]]) -> None:
        arriving = next(plan, None)
        self._arriving = arriving is not None
        if arriving is not None:
            at_s, script = arriving
            self._later(at_s, self._arrive, (script, plan))

    def _arrive(self, now_s: float, what: tuple[Script, Iterator[tuple[float, Script]]]) -> None:
        script, plan = what
        self._next_arrival(plan)
        self._begin(now_s, script)

    def _begin(self, now_s: float, script: Script) -> None:
        request = script.next(None)
        if request is not None:
            self.arrived += 1
            id = script.conversation
            one = self._under_way[id] = Open(script, request, Program(id), TurnKey(id, 0, 0))
            self._later(now_s + self._gap_s(request), self._send, one)

    def _gap_s(self, request: TurnRequest) -> float:
        return request.gap_s if self._gaps else 0.0

    def _send(self, now_s: float, one: Open) -> None:
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
        self._serve(one, prompt_tokens, now_s)

    def _reusable(self, one: Open) -> int:
        """Tokens that the prompt shares with the one before; all of that one, where not said."""
        if one.request.reused_tokens is not None:
            return one.request.reused_tokens
        return one.records[-1].prompt_tokens if one.records else 0

    def _completed(
        self, one: Open, work: EngineTurn, server: str, now_s: float, found_tokens: int = 0
    ) -> None:
        """Record a turn, with what another engine's cache had of it, and have its client go on."""
        request = one.request
        following = one.script.next(_NOTHING_SAID)
        one.records.append(TurnRecord(
            system=self.system.name, conversation=work.conversation, turn=len(one.records) + 1,
            planned_s=one.sent_s, sent_s=one.sent_s, ended_s=now_s, outcome="completed",
            first_token_s=work.first_token_s, last_token_s=now_s,
            effective=bool(request.effective), last=following is None,
            prompt_tokens=work.prompt_tokens, output_tokens=work.output_tokens,
            cached_tokens=max(work.cached_tokens, found_tokens), server=server,
            reused_tokens=request.reused_tokens,
        ))  # fmt: skip
        self.turns += 1
        if following is None:
            self._close(one, now_s)
        else:
            one.request = following
            self._later(now_s + self._gap_s(following), self._send, one)

    def _refuse(self, one: Open, now_s: float, error: str) -> None:
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

    def _close(self, one: Open, now_s: float) -> None:
        self.ended_s = now_s
        del self._under_way[one.script.conversation]
        self._closed(one, now_s)
        self._on_conversation(one.records)
        following = next(self._next_programs, None)
        if following is not None:
            self._later(now_s, self._begin, following[1])
