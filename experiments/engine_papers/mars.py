"""MARS's evaluation (section 6): programs whose tools take CPUs, on one engine."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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
from experiments.engine_papers.admission import ControlPlane
from experiments.engine_papers.programs import Program, Tools, draw
from experiments.scale.scenes import regime

# Mean tokens of all prompts of a program together (section 6.1).
VOLUMES_TOKENS = {"ILR-1": 125_000, "ILR-2": 167_000, "ILR-3": 220_000, "ILR-4": 263_000}
GPUS = {"H100": H100_NVL, "H200": H200_NVL}
# "E.g. ILR-2/3 at 0.2-0.33 req/s" (6.3), "ILR-1, 0.5 req/s" (6.5).
RATES_PER_S = (0.2, 0.33, 0.5)
# One of the H200 node's two CPUs (32 cores each). How many tools had is not said.
CORES = 32


@dataclass(frozen=True, slots=True)
class System:
    """Tells which system is compared.

    Attributes:
        parts: of the scheduler that knows conversations; None: vLLM's.
        admits: whether a control plane does.
        packs: whether its line is MARS's.
    """

    name: str
    parts: Parts | None = None
    admits: bool = False
    packs: bool = False


OURS = System("conserve", Parts(), admits=True)
PACKED = replace(OURS, name="conserve, MARS's packing", packs=True)
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


@dataclass(frozen=True, slots=True)
class Outcome:
    """Tells what came out of one run.

    Attributes:
        mean_s, p95_s: from a program's arrival to its end, tools included.
        found: of what later prompts repeat, the share that the cache had.
        prefilled_tokens, decoded_tokens: what the engine computed.
    """

    system: str
    point: Point
    seed: int
    mean_s: float
    p95_s: float
    longest_s: float
    found: float
    preemptions: int
    prefilled_tokens: int
    decoded_tokens: int
    busy: float


@dataclass(slots=True)
class _Live:
    program: Program
    turn: int = 0
    context_tokens: int = 0
    ended_s: float = field(default=-1.0)


class Node:
    """One engine, tools' CPUs, and programs that go from one to the other."""

    def __init__(self, system: System, gpu: Gpu, cores: int, block_tokens: int = 16) -> None:
        self.loop = Loop()
        steps = Steps(gpu, QWEN3_CODER_30B)
        blocks = Blocks(steps.capacity_tokens // block_tokens, block_tokens)
        self.scheduler: Scheduler
        if system.parts is None:
            self.scheduler = Scheduler(blocks)
        else:
            self.scheduler = ConversationScheduler(blocks, parts=system.parts)
        self.engine = Engine(self.loop, self.scheduler, steps, self._turn_ends)
        self.tools = Tools(self.loop, cores)
        self.control = None
        if system.admits:
            self.control = ControlPlane(
                self.loop,
                self.scheduler,
                lambda: self.tools.pressure,
                self._begin,
                packs=system.packs,
            )
        self._live: dict[str, _Live] = {}

    def serve(self, programs: Sequence[Program]) -> list[float]:
        """Serve programs to their ends; how long each took."""
        for program in programs:
            self._live[program.key] = _Live(program)
            self.loop.at(program.arrives_s, self._arrives, program)
        self.loop.run()
        return [one.ended_s - one.program.arrives_s for one in self._live.values()]

    def _arrives(self, program: Program) -> None:
        if self.control is not None:
            self.control.enter(program.key, program.turns[0].append_tokens)
        else:
            self._begin(program.key)

    def _begin(self, key: str) -> None:
        one = self._live[key]
        turn = one.program.turns[one.turn]
        one.context_tokens += turn.append_tokens
        last = one.turn + 1 == len(one.program.turns)
        arrived_s = one.program.arrives_s
        if self.control is not None:
            self.control.grown(key, one.context_tokens + turn.output_tokens)
        # Nobody tells baselines what comes; ours go by what clients of ConServe may say.
        said = last and isinstance(self.scheduler, ConversationScheduler) and self.control
        self.engine.submit(
            Call(key, one.context_tokens, turn.output_tokens, arrived_s, last=bool(said))
        )

    def _turn_ends(self, call: Call) -> None:
        one = self._live[call.key]
        turn = one.program.turns[one.turn]
        one.context_tokens += turn.output_tokens
        one.turn += 1
        if one.turn < len(one.program.turns):
            self.tools.run(turn.tool_s, lambda: self._begin(call.key))
            return
        one.ended_s = self.loop.now_s
        if self.control is not None:
            self.scheduler.forget(call.key)
            self.control.left(call.key)


def run(system: System, point: Point, seed: int, cores: int = CORES) -> Outcome:
    """One run."""
    arrivals = Arrivals("poisson", point.rate_per_s, seed)
    programs = draw(regime(VOLUMES_TOKENS[point.regime]), point.programs, arrivals, seed)
    node = Node(system, GPUS[point.gpu], cores)
    took_s = node.serve(programs)
    scheduler = node.scheduler
    return Outcome(
        system.name,
        point,
        seed,
        mean_s=fmean(took_s),
        p95_s=float(np.percentile(took_s, 95)),
        longest_s=max(took_s),
        found=1 - scheduler.recomputed_tokens / max(1, scheduler.expected_tokens),
        preemptions=scheduler.preemptions,
        prefilled_tokens=node.engine.prefilled_tokens,
        decoded_tokens=node.engine.decoded_tokens,
        busy=node.engine.busy_s / node.loop.now_s,
    )
