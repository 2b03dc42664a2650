"""A simulated cluster of engines that prefill and decode, used by another system's rules."""

from conserve_lab.counters import ServerFigures
from conserve_lab.simulate.clients import Clients, Open
from conserve_lab.simulate.engine import EngineTurn, SimulatedEngine
from conserve_lab.simulate.rivals import make_rival
from conserve_lab.simulate.system import System


class Fleet(Clients):
    """One run of one rival. No turn is refused but one that no engine holds.

    With host memory, all that is computed is copied there, as vLLM with LMCache does it.
    """

    def _prepare(self, system: System) -> None:
        assert system.rival is not None
        self.prefillers = {}
        self.decoders = {
            (name := f"engine-{i}"): self._engine(name, costs, self._answered)
            for i, costs in enumerate(system.decoders)
        }
        self._rival = make_rival(
            system.rival,
            self.decoders,
            ttl_s=system.ttl_s,
            interval_s=system.interval_s,
            decay=system.decay,
        )
        self._checking = False

    def figures(self, kv_bytes_per_token: float) -> ServerFigures:
        return ServerFigures(shared_found_tokens=self.shared_found_tokens())

    def _serve(self, one: Open, prompt_tokens: int, now_s: float) -> None:
        program = one.program
        if not program.turns:
            program.arrived_s = now_s
        program.turns += 1
        program.tokens = prompt_tokens
        program.reasoning = True
        self._check_later(now_s)
        engine_id = self._rival.route(program, now_s)
        if engine_id is not None:
            self._go(one, engine_id, now_s)

    def _check_later(self, now_s: float) -> None:
        if self._rival.interval_s is not None and not self._checking:
            self._checking = True
            self._later(now_s + self._rival.interval_s, self._check, None)

    def _check(self, now_s: float, nothing: None) -> None:
        self._checking = False
        for program, engine_id in self._rival.check(now_s):
            self._go(self._under_way[program.id], engine_id, now_s)
        if self._under_way:
            self._check_later(now_s)

    def _go(self, one: Open, engine_id: str, now_s: float) -> None:
        request, program = one.request, one.program
        program.engine_id = engine_id
        work = EngineTurn(
            program.id,
            request.prompt_tokens or 0,
            request.output_tokens or 0,
            self._reusable(one),
            turn=one,
            priority=self._rival.priority(program),
            shared=request.shared,
        )
        engine = self.decoders[engine_id]
        one.found_tokens = 0
        loaded_s = self._load(one, work, engine, now_s) - now_s
        self._submit(work, engine, now_s, self.system.direct_s + loaded_s)

    def _answered(self, work: EngineTurn, engine: SimulatedEngine, now_s: float) -> None:
        one: Open = work.turn
        program = one.program
        program.tokens = work.prompt_tokens + work.output_tokens
        program.reasoning = False
        program.acting_s = now_s
        program.attained_s += now_s - work.admitted_s
        if self.system.host_tokens:
            # What others begin with is there for nothing.
            self._leave(one, work.prompt_tokens, now_s, work.shared_tokens)
        self._rival.answered(program, now_s)
        keep_s = self._rival.keep_s(program)
        if keep_s:
            engine.pin(program.id, now_s + keep_s)
        self._completed(one, work, engine.id, now_s, one.found_tokens)

    def _closed(self, one: Open, now_s: float) -> None:
        self._rival.ended(one.program)
        # Its tools are over too.
        for engine in self.decoders.values():
            engine.unpin(one.program.id)
            if not self.system.keeps_ended:
                engine.forget(one.program.id)
