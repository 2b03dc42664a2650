"""One system in one scene: simulate it, and say what came out."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import fmean

from autoscale.capacity.profile import Profile, load_profile
from benchmarks.experiments.scale.scenes import PROFILE, Arriving, ClosedLoop, Contender
from benchmarks.records import TurnRecord
from benchmarks.simulate.clients import Clients
from benchmarks.simulate.run import EngineCounts, make_cluster, make_system
from benchmarks.simulate.system import System
from benchmarks.workloads import Workload


@dataclass(frozen=True, slots=True)
class Figures:
    """Tells what came out.

    Attributes:
        load: number of programs at a time, or arrivals a second.
        tokens_per_s, steps_per_min: output tokens, and turns that ended.
        found: of what later turns repeat, the share that no engine had to compute.
        latency_s: mean time of a turn, from when it was sent.
        program_s: mean time of a program that ended, its tools' included; None where none did.
        failed: turns that were refused.
        preemptions: running turns that were sent back.
        busy: the share of the time in which engines ran a step: collocated ones, or ConServe's
            prefillers and decoders.
    """

    scene: str
    system: str
    load: float
    tokens_per_s: float
    steps_per_min: float
    found: float
    latency_s: float
    program_s: float | None
    failed: int
    preemptions: int
    busy: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """One simulation: of a closed loop with so many programs, or of arrivals at such a rate."""

    scene: ClosedLoop | Arriving
    contender: Contender
    load: float
    engines: EngineCounts
    data: Path | None
    seed: int

    @property
    def about(self) -> str:
        """Say what it is, in a few words."""
        return f"{self.scene.name}, {self.load:g}: {self.contender.label}"


def measure(run: Run) -> Figures:
    """Simulate."""
    records: list[TurnRecord] = []
    scene, profile = run.scene, load_profile(PROFILE)
    cluster = make_cluster(_system(run.contender, profile, run.engines), records.extend)
    if isinstance(scene, Arriving):
        cluster.run(scene.workload(run.load, run.seed))
        return _figures(run, records, cluster.ended_s, cluster.ended_s, cluster)
    until_s = scene.seconds
    workload = _workload(scene, run.data, run.seed)
    cluster.run_programs(workload, int(run.load), until_s, ramp_s=until_s / 10)
    counted = [one for one in records if one.ended_s > until_s / 3]
    return _figures(run, counted, 2 / 3 * until_s, until_s, cluster)


# Making one reads all recordings.
@lru_cache(maxsize=1)
def _workload(scene: ClosedLoop, data: Path | None, seed: int) -> Workload:
    return scene.workload(data, seed)


def _system(contender: Contender, profile: Profile, engines: EngineCounts) -> System:
    options = dict(contender.options)
    if contender.host_tokens_each:
        count = engines.prefillers + engines.decoders
        options["host_tokens"] = count * contender.host_tokens_each
    return make_system(contender.system, profile, engines, **options)


def _figures(
    run: Run,
    records: Sequence[TurnRecord],
    counted_s: float,
    whole_s: float,
    cluster: Clients,
) -> Figures:
    ended = [one for one in records if one.outcome == "completed"]
    repeated = found = 0
    began_s: dict[str, float] = {}
    program_s: list[float] = []
    for one in ended:
        if one.turn == 1:
            began_s[one.conversation] = one.sent_s
        else:
            repeated += one.reused_tokens or 0
            found += min(one.reused_tokens or 0, one.cached_tokens or 0)
        if one.last and one.conversation in began_s:
            program_s.append(one.ended_s - began_s[one.conversation])
    engines = (*cluster.prefillers.values(), *cluster.decoders.values())
    return Figures(
        scene=run.scene.name,
        system=run.contender.label,
        load=run.load,
        tokens_per_s=sum(one.output_tokens for one in ended) / counted_s,
        steps_per_min=60 * len(ended) / counted_s,
        found=found / repeated if repeated else 0.0,
        latency_s=fmean(one.ended_s - one.sent_s for one in ended),
        program_s=fmean(program_s) if program_s else None,
        failed=len(records) - len(ended),
        preemptions=sum(engine.preemptions for engine in engines),
        busy=tuple((engine.busy_prefill_s + engine.busy_decode_s) / whole_s for engine in engines),
    )
