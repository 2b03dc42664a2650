"""AgentServe's evaluation (section IV): few agents on one consumer's GPU."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from benchmarks.simulate.inside.blocks import Blocks
from benchmarks.simulate.inside.conversations import ConversationScheduler, Parts
from benchmarks.simulate.inside.costs import (
    A5000,
    LLAMA3_8B,
    QWEN25_3B,
    QWEN25_7B,
    RTX_5090,
    Gpu,
    Model,
    Steps,
)
from benchmarks.simulate.inside.engine import Engine
from benchmarks.simulate.inside.lane import LaneEngine
from benchmarks.simulate.inside.scheduler import Scheduler
from benchmarks.simulate.inside.sm_share import FedBackShare, FixedShare
from benchmarks.workloads import PRESETS, Arrivals, Latency, Shape, Spread
from conserve.engine_scheduling.chunks import LATE_TIMES
from experiments.engine_papers.programs import Live, Program, Sessions, draw

GPUS = {"A5000": A5000, "5090": RTX_5090}
MODELS = {"Qwen2.5-3B": QWEN25_3B, "Qwen2.5-7B": QWEN25_7B, "Llama-3-8B": LLAMA3_8B}
# The least and the most of section IV-A.
AGENTS = (3, 6)
# Table I: what turns put out, by model.
OUTPUTS = {
    ("react", "Qwen2.5-3B"): Spread(27, 37, 99),
    ("react", "Qwen2.5-7B"): Spread(21, 45, 127),
    ("react", "Llama-3-8B"): Spread(32, 38, 101),
    ("plan-and-execute", "Qwen2.5-3B"): Spread(41, 55, 125),
    ("plan-and-execute", "Qwen2.5-7B"): Spread(33, 62, 141),
    ("plan-and-execute", "Llama-3-8B"): Spread(22, 64, 116),
}
# The paper does not say how long tools take: remote ones, as in the presets; or answers from a
# cache, as in StableToolBench, which it cites for the workload.
TOOLS = {"remote": Latency(1.0, 10.0), "cached": Latency(0.1, 0.5)}
# Sessions that each agent has, one after the other; the paper does not say.
_SESSIONS_EACH = 8
# Both SLOs of a session, in isolated p95s: "a constant factor" (section IV-A).
_SLO_TIMES = 2.0
# vLLM's default where chunked prefill began; llama.cpp takes prompts whole.
_VLLM_TOKENS, _WHOLE_TOKENS = 512, 8192
_DEFAULT_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class System:
    """Tells which system is compared.

    Attributes:
        step_tokens: of a step without a lane.
        ours: whether ConServe's scheduler cuts chunks.
        lane: ``fixed``: half of the SMs, all prefills; ``fixed, ours``: half, by kind; ``fed
            back``: by algorithm 1; None: none.
    """

    name: str
    step_tokens: int
    ours: bool = False
    lane: str | None = None


LLAMA_CPP = System("llama.cpp", _WHOLE_TOKENS)
VLLM = System("vllm", _VLLM_TOKENS)
VLLM_NOW = System("vllm, 2,048 a step", _DEFAULT_TOKENS)
SGLANG = System("static split (SGLang)", _DEFAULT_TOKENS, lane="fixed")
CHUNKS = System("conserve, no lane", _DEFAULT_TOKENS, ours=True)
STATIC = System("conserve, R fixed at half", _DEFAULT_TOKENS, ours=True, lane="fixed")
LANE = System("conserve, lane", _DEFAULT_TOKENS, ours=True, lane="fed back")
SYSTEMS = (LLAMA_CPP, VLLM, VLLM_NOW, SGLANG, CHUNKS, STATIC, LANE)


@dataclass(frozen=True, slots=True)
class Point:
    """A workload on a GPU."""

    gpu: str
    model: str
    paradigm: str
    agents: int
    tools: str = "remote"


POINTS = [
    Point(gpu, model, paradigm, agents, tools)
    for tools in TOOLS
    for gpu in GPUS
    for model in MODELS
    for paradigm in ("react", "plan-and-execute")
    for agents in AGENTS
]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Tells what came out of one run, over all turns.

    Attributes:
        ttft_s, tpot_s: by percentile; a turn's TPOT is the mean time between its tokens.
        cold_p95_s, resume_p95_s: TTFT of first turns, and of later ones.
        gap_p95_s: between any two tokens of a turn.
        tokens_per_s: put out.
        attained: the share of sessions without a turn over either SLO (figure 6).
    """

    system: str
    point: Point
    seed: int
    ttft_p50_s: float
    ttft_p95_s: float
    tpot_p50_s: float
    tpot_p95_s: float
    cold_p95_s: float
    resume_p95_s: float
    gap_p95_s: float
    tokens_per_s: float
    attained: float


def shape_of(point: Point) -> Shape:
    outputs = OUTPUTS[point.paradigm, point.model]
    return replace(PRESETS[point.paradigm], output_tokens=outputs, tool_latency=TOOLS[point.tools])


class Box(Sessions):
    """One engine, and agents that have one session after the other."""

    def __init__(self, system: System, gpu: Gpu, model: Model, agents: int) -> None:
        # Tools run elsewhere, and no agent runs two.
        super().__init__(cores=agents)
        costs = Steps(gpu, model)
        lone_s = costs.step_s(1, 3_000)
        blocks = Blocks(costs.capacity_tokens // 16)
        scheduler = Scheduler(blocks, system.step_tokens)
        if system.ours:
            parts = Parts(chunking={"lone_s": lone_s})
            scheduler = ConversationScheduler(blocks, system.step_tokens, parts=parts)
        if system.lane is None:
            self.engine = Engine(self.loop, scheduler, costs, self.turn_ends)
        else:
            fed_back = system.lane == "fed back"
            share = FedBackShare(LATE_TIMES * lone_s) if fed_back else FixedShare()
            self.engine = LaneEngine(self.loop, scheduler, costs, self.turn_ends, share)
        self._agents = agents
        self._programs: deque[Program] = deque()

    def serve(self, programs: Sequence[Program]) -> None:
        self._programs.extend(programs)
        for _ in range(self._agents):
            self._next_session()
        self.loop.run()

    def _next_session(self) -> None:
        if self._programs:
            program = self._programs.popleft()
            self.live[program.key] = Live(program)
            self.turn(program.key)

    def ended(self, key: str) -> None:
        self.engine.scheduler.forget(key)
        self._next_session()


@dataclass(frozen=True, slots=True)
class Session:
    """The latencies of one session's turns; a turn's TPOT is the mean time between its tokens."""

    ttft_s: list[float]
    tpot_s: list[float]


def _serve(system: System, point: Point, seed: int) -> Box:
    count = _SESSIONS_EACH * point.agents
    programs = draw(shape_of(point), count, Arrivals("together"), seed)
    box = Box(system, GPUS[point.gpu], MODELS[point.model], point.agents)
    box.serve(programs)
    return box


def _sessions(box: Box) -> list[Session]:
    by: dict[str, Session] = {}
    for call, _ in box.calls:
        one = by.setdefault(call.key, Session([], []))
        one.ttft_s.append(call.first_token_s - call.came_s)
        if call.gaps_s:
            one.tpot_s.append(float(np.mean(call.gaps_s)))
    return list(by.values())


@lru_cache(maxsize=8)
def slos_s(point: Point, seed: int) -> tuple[float, float]:
    """Return the bounds of TTFT and TPOT: by a lone agent's sessions under today's vLLM.

    Args:
        point: of one agent.
    """
    alone = _sessions(_serve(VLLM_NOW, point, seed))
    ttft_s = [s for one in alone for s in one.ttft_s]
    tpot_s = [s for one in alone for s in one.tpot_s]
    return _SLO_TIMES * _percentile(ttft_s, 95), _SLO_TIMES * _percentile(tpot_s, 95)


def run(system: System, point: Point, seed: int) -> Outcome:
    box = _serve(system, point, seed)
    sessions = _sessions(box)
    ttft_s = [s for one in sessions for s in one.ttft_s]
    tpot_s = [s for one in sessions for s in one.tpot_s]
    most_ttft_s, most_tpot_s = slos_s(replace(point, agents=1), seed)
    attained = [
        max(one.ttft_s) <= most_ttft_s and max(one.tpot_s, default=0.0) <= most_tpot_s
        for one in sessions
    ]
    return Outcome(
        system.name,
        point,
        seed,
        ttft_p50_s=_percentile(ttft_s, 50),
        ttft_p95_s=_percentile(ttft_s, 95),
        tpot_p50_s=_percentile(tpot_s, 50),
        tpot_p95_s=_percentile(tpot_s, 95),
        cold_p95_s=_percentile([one.ttft_s[0] for one in sessions], 95),
        resume_p95_s=_percentile([s for one in sessions for s in one.ttft_s[1:]], 95),
        gap_p95_s=_percentile([gap for call, _ in box.calls for gap in call.gaps_s], 95),
        tokens_per_s=sum(call.made_tokens for call, _ in box.calls) / box.loop.now_s,
        attained=sum(attained) / len(attained),
    )


def _percentile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent))
