"""MARS's evaluation (section 6): programs that arrive at a node with one engine and tools' CPUs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import fmean

import numpy as np

from benchmarks.simulate.inside.blocks import Blocks
from benchmarks.simulate.inside.call import Call
from benchmarks.simulate.inside.conversations import (
    ConversationScheduler,
    Parts,
    attained_service,
    time_to_live,
)
from benchmarks.simulate.inside.costs import H100_NVL, H200_NVL, QWEN3_CODER_30B, Gpu, Steps
from benchmarks.simulate.inside.engine import Engine
from benchmarks.simulate.inside.loop import Loop
from benchmarks.simulate.inside.scheduler import Scheduler
from benchmarks.workloads import Arrivals
from conserve.admission import Levels, LineOrder, Pressure, Ticket, WaitingLine, Window
from conserve.pausing import ToolTimes
from experiments.engine_papers.programs import Live, Program, Sessions, draw
from experiments.scale import regime

# Mean tokens of all prompts of a program together (section 6.1).
VOLUMES_TOKENS = {"ILR-1": 125_000, "ILR-2": 167_000, "ILR-3": 220_000, "ILR-4": 263_000}
GPUS = {"H100": H100_NVL, "H200": H200_NVL}
# "E.g. ILR-2/3 at 0.2-0.33 req/s" (6.3), "ILR-1, 0.5 req/s" (6.5).
RATES_PER_S = (0.2, 0.33, 0.5)
# Equation 2's alpha: a program's target, in times that it takes alone.
SLACKS = (2.0, 3.0)
# One of the H200 node's two CPUs (32 cores each). How many tools had is not said.
CORES = 32


@dataclass(frozen=True, slots=True)
class System:
    """Tells which system is compared.

    Attributes:
        parts: of the scheduler that knows conversations; None: vLLM's.
        admits: whether a control plane does.
        packs: whether its line is MARS's.
        times: whether the window follows tools' times, as in the live system, not their cores.
    """

    name: str
    parts: Parts | None = None
    admits: bool = False
    packs: bool = False
    times: bool = False


OURS = System("conserve", Parts(), admits=True)
PACKED = replace(OURS, name="conserve, MARS's packing", packs=True)
# In the published tables, the window knows how many cores are asked for.
TIMED = replace(OURS, name="conserve, tools' times", times=True)
BASELINES = (
    System("vllm"),
    System("attained (Autellix)", attained_service()),
    System("ttl, 2 s (Continuum)", time_to_live(2.0)),
)
SYSTEMS = (*BASELINES, OURS, PACKED)
# One mechanism less each, as in the paper's figure 13.
WITHOUT = (
    System("without order", Parts(order=False), admits=True),
    System("without chunks", Parts(chunks=False), admits=True),
    System("without retention", Parts(retention=False), admits=True),
    System("without parts of prompts", Parts(in_parts=False), admits=True),
    System("without admission", Parts()),
    System("without admission, order", Parts(order=False)),
    System("admission alone", admits=True),
)


@dataclass(frozen=True, slots=True)
class Point:
    """A workload at a rate on a GPU."""

    gpu: str
    regime: str
    rate_per_s: float
    programs: int = 60


POINTS = [
    Point(gpu, regime, rate_per_s)
    for gpu in GPUS
    for regime in VOLUMES_TOKENS
    for rate_per_s in RATES_PER_S
]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Tells what came out of one run.

    Attributes:
        mean_s, p95_s: from a program's arrival to its end, tools included.
        goodput_per_s: programs that ended within each of `SLACKS` times what they take alone, over
            the time until all have ended (equation 1).
        found: of what later prompts repeat, the share that the cache had.
        prefilled_tokens, decoded_tokens: what the engine computed.
    """

    system: str
    point: Point
    seed: int
    mean_s: float
    p95_s: float
    longest_s: float
    goodput_per_s: tuple[float, ...]
    found: float
    preemptions: int
    prefilled_tokens: int
    decoded_tokens: int
    busy: float


# --- Its control plane: which programs are active (section 4.2), by `conserve.admission` ---------

# This number of tickets in front are tried for one that fits, as in `conserve.admission.admission`.
_TRIED = 8
_LOOK_S = 1.0
# No program gives up here.
_PATIENCE_S = 1e9


class SmallestFirst:
    """MARS's packing of the line (algorithm 1, PackQueue): the shortest prompt first, while CPUs
    are overloaded the longest. A ticket that does not fit is overtaken, and may wait for ever.

    Args:
        cpu_overloaded: whether CPUs are, now.
    """

    def __init__(self, cpu_overloaded: Callable[[], bool]) -> None:
        self._cpu_overloaded = cpu_overloaded
        self._tickets: dict[str, Ticket] = {}

    def join(self, ticket: Ticket) -> None:
        self._tickets[ticket.history_id] = ticket

    def leave(self, ticket: Ticket, *, went: bool) -> None:
        del self._tickets[ticket.history_id]

    def tickets(self, now_s: float) -> Iterator[Ticket]:
        """Yield the waiting tickets, in admission order."""
        reverse = self._cpu_overloaded()
        ordered = sorted(self._tickets.values(), key=lambda one: one.prompt_tokens, reverse=reverse)
        return iter(ordered)

    def holds_up(self, ticket: Ticket, now_s: float) -> bool:
        return False


class ControlPlane:
    """Lets programs in while there is room for their prompts, and by `Window`.

    Room is what the table counts: the histories of all that are in, as long as they are by now,
    against the engine's KV. A program that was let in stays in.

    Args:
        scheduler: of the engine, whose KV and recomputed tokens are looked at.
        cpu_pressure: of the machine that tools run on.
        begin: called with the key of a program that is let in.
        packs: whether the line is MARS's, by size; else `Levels`, as ConServe's.
        times: of the tools that run; if given, the window follows these and not ``cpu_pressure``.

    Attributes:
        longest_wait_s: in the line.
    """

    def __init__(
        self,
        loop: Loop,
        scheduler: Scheduler,
        cpu_pressure: Callable[[], float],
        begin: Callable[[str], None],
        *,
        packs: bool = False,
        times: ToolTimes | None = None,
    ) -> None:
        self._loop = loop
        self._times = times
        self._scheduler = scheduler
        self._cpu_pressure = cpu_pressure
        self._begin = begin
        self.window = Window()
        order: LineOrder = SmallestFirst(self._cpu_overloaded) if packs else Levels()
        self.line = WaitingLine(1_000_000, _PATIENCE_S, order)
        self._held_tokens: dict[str, int] = {}
        self._looks = False
        self._counted = (0, 0)
        self.longest_wait_s = 0.0

    def enter(self, key: str, prompt_tokens: int) -> None:
        self.line.join(key, prompt_tokens, self._loop.now_s)
        self._admit()

    def grown(self, key: str, tokens: int) -> None:
        """A program's history is so long by now."""
        self._held_tokens[key] = tokens

    def left(self, key: str) -> None:
        del self._held_tokens[key]
        self._admit()

    def _admit(self) -> None:
        while (ticket := self._fitting()) is not None:
            self.line.leave(ticket.history_id, went=True)
            self._held_tokens[ticket.history_id] = ticket.prompt_tokens
            self.longest_wait_s = max(self.longest_wait_s, self._loop.now_s - ticket.joined_s)
            self._begin(ticket.history_id)
        if (self.line or self._held_tokens) and not self._looks:
            self._looks = True
            self._loop.at(self._loop.now_s + _LOOK_S, self._look)

    def _fitting(self) -> Ticket | None:
        now_s, blocks = self._loop.now_s, self._scheduler.blocks
        if len(self._held_tokens) >= self.window.limit:
            return None
        room = blocks.total * blocks.block_tokens - sum(self._held_tokens.values())
        for tried, ticket in enumerate(self.line.tickets(now_s)):
            # A program alone is let in, whatever its prompt.
            if ticket.prompt_tokens <= room or not self._held_tokens:
                return ticket
            if tried + 1 == _TRIED or self.line.holds_up(ticket, now_s):
                break
        return None

    def _look(self) -> None:
        self._looks = False
        if self.window.is_due(self._loop.now_s):
            scheduler, before = self._scheduler, self._counted
            self._counted = scheduler.expected_tokens, scheduler.recomputed_tokens
            expected = max(1, self._counted[0] - before[0])
            kv, now_s = (self._counted[1] - before[1]) / expected, self._loop.now_s
            pressure = Pressure(kv, self._cpu_pressure())
            if self._times is not None:
                pressure = Pressure(kv, tools=self._times.pressure(now_s))
            self.window.observe(now_s, len(self._held_tokens), pressure)
        self._admit()

    def _cpu_overloaded(self) -> bool:
        return self._cpu_pressure() >= 0.9


# --- One engine, and tools ------------------------------------------------------------------------


class Node(Sessions):
    """One engine, tools' CPUs, and programs that arrive."""

    def __init__(self, system: System, gpu: Gpu, cores: int, block_tokens: int = 16) -> None:
        super().__init__(cores)
        steps = Steps(gpu, QWEN3_CODER_30B)
        blocks = Blocks(steps.capacity_tokens // block_tokens, block_tokens)
        self.scheduler = Scheduler(blocks)
        if system.parts is not None:
            parts = replace(system.parts, chunking={"lone_s": steps.step_s(1, 3_000)})
            self.scheduler = ConversationScheduler(blocks, parts=parts)
        self.engine: Engine = Engine(self.loop, self.scheduler, steps, self.turn_ends)
        self.times = ToolTimes()
        self.control: ControlPlane | None = None
        if system.admits:
            self.control = ControlPlane(
                self.loop,
                self.scheduler,
                lambda: self.tools.pressure,
                self.turn,
                packs=system.packs,
                times=self.times if system.times else None,
            )

    def serve(self, programs: Sequence[Program]) -> list[float]:
        """Serve programs to their ends; how long each took."""
        for program in programs:
            self.live[program.key] = Live(program)
            self.loop.at(program.arrives_s, self._arrives, program)
        self.loop.run()
        return [one.ended_s - one.program.arrives_s for one in self.live.values()]

    def _arrives(self, program: Program) -> None:
        if self.control is not None:
            self.control.enter(program.key, program.turns[0].append_tokens)
        else:
            self.turn(program.key)

    def turn(self, key: str) -> None:
        """A program's next turn comes, and the control plane hears how long its history gets."""
        self.times.ends(key, self.loop.now_s)
        super().turn(key)
        if self.control is not None:
            call, _ = self.calls[-1]
            self.control.grown(key, call.prompt_tokens + call.output_tokens)

    def turn_ends(self, call: Call) -> None:
        self.times.begins(call.key, "tool", self.loop.now_s)
        super().turn_ends(call)

    def ended(self, key: str) -> None:
        self.times.drop(key)
        if self.control is not None:
            self.scheduler.forget(key)
            self.control.left(key)


@lru_cache(maxsize=4)
def alone_s(gpu: str, programs: tuple[Program, ...]) -> tuple[float, ...]:
    """Return how long each program takes without others, under vLLM's scheduler."""
    first = BASELINES[0]
    return tuple(Node(first, GPUS[gpu], CORES).serve([one])[0] for one in programs)


def run(system: System, point: Point, seed: int, cores: int = CORES) -> Outcome:
    arrivals = Arrivals("poisson", point.rate_per_s, seed)
    programs = draw(regime(VOLUMES_TOKENS[point.regime]), point.programs, arrivals, seed)
    node = Node(system, GPUS[point.gpu], cores)
    took_s = node.serve(programs)
    # The same programs come at all rates.
    ideal_s = alone_s(point.gpu, tuple(replace(one, arrives_s=0.0) for one in programs))
    lateness = [took / ideal for took, ideal in zip(took_s, ideal_s, strict=True)]
    scheduler = node.scheduler
    return Outcome(
        system.name,
        point,
        seed,
        mean_s=fmean(took_s),
        p95_s=float(np.percentile(took_s, 95)),
        longest_s=max(took_s),
        goodput_per_s=tuple(
            sum(times <= slack for times in lateness) / node.loop.now_s for slack in SLACKS
        ),
        found=1 - scheduler.recomputed_tokens / max(1, scheduler.expected_tokens),
        preemptions=scheduler.preemptions,
        prefilled_tokens=node.engine.prefilled_tokens,
        decoded_tokens=node.engine.decoded_tokens,
        busy=node.engine.busy_s / node.loop.now_s,
    )
