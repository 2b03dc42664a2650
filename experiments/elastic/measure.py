"""One scene at one load: simulate its systems, and say what came out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

import numpy as np

from autoscale.capacity.profile import load_profile
from benchmarks.latencies import conversation_outcome, latencies_of
from benchmarks.records import TurnRecord
from benchmarks.simulate.run import Baseline, make_system, simulate
from experiments.elastic.scenes import ENGINES, Scene, session_s


@dataclass(frozen=True, slots=True)
class Figures:
    """Tells what came out of one simulation.

    Attributes:
        engines: prefillers to decoders; a collocated system has as many in all.
        load: arrivals, as a share of what engines nominally serve.
        refused: conversations that failed, of `conversations`.
        ttfet_p50_s, ttfet_p95_s: gaps not counted; a conversation that failed counts as slower than
            any, so None says that more than half, or a twentieth, of them did.
        last_tbt_p95_s: of those that completed.
        over_slo: the share whose TTFET is above five times the unloaded one, or that failed.
    """

    scene: str
    engines: str
    load: float
    seed: int
    system: str
    conversations: int
    refused: int
    ttfet_p50_s: float | None
    ttfet_p95_s: float | None
    last_tbt_p95_s: float
    over_slo: float
    preemptions: int


@dataclass(frozen=True, slots=True)
class Cell:
    """A scene's systems under the same conversations."""

    scene: Scene
    engines: str
    load: float
    seed: int

    @property
    def about(self) -> str:
        """Say what it is, in a few words."""
        return f"{self.scene.name}, {self.engines}, {self.load:g}, seed {self.seed}"


def measure(cell: Cell, systems: Sequence[str], data: Path | None) -> Iterator[Figures]:
    """Simulate, one after the other.

    Args:
        systems: of the scene's, those that are to be.
        data: a folder of recorded sessions.
    """
    scene, counts = cell.scene, ENGINES[cell.engines]
    profile = load_profile(scene.profile)
    alone = scene.selection(1.0, cell.seed, data).workload()
    nominal_s = session_s(profile, alone, kv="host_tokens" not in scene.options)
    rate_per_s = cell.load * (counts.prefillers + counts.decoders) / nominal_s
    selection = scene.selection(rate_per_s, cell.seed, data)
    workload = selection.workload()
    first = make_system(scene.systems[0], profile, counts, **scene.options)
    baseline = Baseline.of(first, workload)
    for name in systems:
        ttfet: list[float] = []
        outcomes: list[str] = []

        def ended(
            turns: list[TurnRecord],
            ttfet: list[float] = ttfet,
            outcomes: list[str] = outcomes,
        ) -> None:
            outcomes.append(conversation_outcome(turns))
            if outcomes[-1] == "failed":
                ttfet.append(inf)
            ttfet.extend(s for metric, s in latencies_of(turns) if metric == "ttfet_less_gaps")

        report = simulate(
            make_system(name, profile, counts, **scene.options),
            workload,
            profile,
            baseline,
            described=selection.describe(),
            arrivals=selection.describe_arrivals(None),
            keep_samples=False,
            on_conversation=ended,
        )
        engines = report.driver["engines"].values()
        yield Figures(
            scene.name,
            cell.engines,
            cell.load,
            cell.seed,
            name,
            len(outcomes),
            outcomes.count("failed"),
            _percentile(ttfet, 50),
            _percentile(ttfet, 95),
            report.result.latencies["last_tbt"].p95,
            report.result.violations["ttfet_less_gaps"],
            sum(engine["preemptions"] for engine in engines),
        )


def _percentile(values: Sequence[float], percent: float) -> float | None:
    value = float(np.percentile(values, percent, method="higher"))
    return None if value == inf else value
