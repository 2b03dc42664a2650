"""`placement: elastic` beside the paper's, collocated engines and session affinity, simulated.

Each scene is a workload on engines of one kind; the load is a share of what they nominally serve.
Without recorded sessions (``--data``) their scenes are left out. With ``--out`` what was simulated
before is not simulated again: it can be stopped, and gone on with.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from math import inf, nan
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD

from autoscale.capacity.profile import Profile, load_profile
from benchmarks.latencies import conversation_outcome, latencies_of
from benchmarks.records import Answer, TurnRecord
from benchmarks.selection import Selection
from benchmarks.simulate.run import Baseline, EngineCounts, make_system, simulate
from benchmarks.workloads import Workload
from experiments.harness import Experiment, figure, group, numbers, pivot

_NOTHING_SAID = Answer("")
# Of a nominal engine: see `session_s`.
_BATCH = 8

ENGINES: dict[str, EngineCounts] = {
    "1:1": EngineCounts(1, 1),
    "1:3": EngineCounts(1, 3),
    "2:6": EngineCounts(2, 6),
}
LOADS = (0.3, 0.5, 0.7, 0.85, 1.0, 1.3)
_FEWER = (0.3, 0.7, 1.0, 1.3)
# Placements alone; and as `conserve serve` has them: idle histories make room, and come back from
# host memory.
_PLACED = ("conserve", "collocated", "affinity", "elastic")
_PARKING = ("parking", "collocated_parking", "elastic_parking")


@dataclass(frozen=True, slots=True)
class Scene:
    """A workload on engines of one kind.

    Attributes:
        recorded: recorded sessions; else the ConServe paper's conversations.
        scale_tokens: of recorded ones, what their lengths are multiplied by.
        systems: as `benchmarks.simulate.run.make_system` knows them.
        options: fields of `benchmarks.simulate.System`, for all of them.
        engines, loads: prefillers to decoders, and shares of saturation.
    """

    name: str
    profile: str
    conversations: int
    recorded: bool = False
    scale_tokens: float | None = None
    systems: tuple[str, ...] = _PLACED
    options: Mapping[str, Any] = field(default_factory=dict)
    engines: tuple[str, ...] = tuple(ENGINES)
    loads: tuple[float, ...] = LOADS

    def selection(self, rate_per_s: float, seed: int, data: Path | None) -> Selection:
        if not self.recorded:
            return Selection("synthetic", self.conversations, rate_per_s=rate_per_s, seed=seed)
        return Selection(
            "recorded",
            self.conversations,
            rate_per_s=rate_per_s,
            seed=seed,
            data=data,
            scale_tokens=self.scale_tokens,
            max_gap_s=60.0,
            max_context_tokens=131_072,
        )


# Conversations wait for room until there is some.
_ENDLESS_LINE = {"queue_limit": 1_000_000, "queue_timeout_s": 1e9}
# A million tokens of KV an engine: 147 GB of host memory.
_HOST_TOKENS = 2_000_000

SCENES: tuple[Scene, ...] = (
    # This many, since of 400 twenty are slower than the p95, and it moves by 8 % with the seed.
    Scene("paper, A40", "a40-qwen3-0.6b", 2_000),
    Scene("paper, H100", "h100-qwen3-8b", 2_000, loads=_FEWER),
    # Affinity refuses no conversation, so here no other system does.
    Scene(
        "paper, A40, endless line",
        "a40-qwen3-0.6b",
        2_000,
        options=_ENDLESS_LINE,
        loads=(0.85, 1.0, 1.3),
    ),
    # The A40 profile's model ends at 32k tokens.
    Scene("recorded, A40", "a40-qwen3-0.6b", 280, True, 0.25, (*_PLACED, *_PARKING), loads=_FEWER),
    Scene("recorded, H100", "h100-qwen3-8b", 280, True, None, (*_PLACED, *_PARKING), loads=_FEWER),
    Scene(
        "recorded, A40, endless line",
        "a40-qwen3-0.6b",
        280,
        recorded=True,
        scale_tokens=0.25,
        options=_ENDLESS_LINE,
        loads=(1.0, 1.3),
    ),
    Scene(
        "recorded, H100, host memory",
        "h100-qwen3-8b",
        140,
        recorded=True,
        systems=("parking", "elastic_parking"),
        options={"host_tokens": _HOST_TOKENS},
        engines=("1:1",),
        loads=(0.3, 0.5, 0.7),
    ),
    Scene(
        "recorded, H100, host memory, longer waits",
        "h100-qwen3-8b",
        140,
        recorded=True,
        systems=("parking", "elastic_parking"),
        options={"host_tokens": _HOST_TOKENS, "queue_timeout_s": 300.0},
        engines=("1:1",),
        loads=(0.5, 0.7),
    ),
)


def session_s(profile: Profile, workload: Workload, *, kv: bool = True) -> float:
    """For how long a conversation keeps a nominal engine, on average.

    That is all its prefills, with what its prompts repeat found, and its decodes at a batch of
    eight; or, if it is longer, the time for which it is there, gaps included, times its share of
    the engine's KV space. The sum is the number of saturated engines.

    Args:
        kv: whether KV space counts: host memory has it between turns where there is much of that.
    """
    busy_s, held_token_s, count = 0.0, 0.0, 0
    prefill, decode = profile.prefill, profile.decode
    for _, script in workload:
        count += 1
        last_tokens = 0
        request = script.next(None)
        while request is not None:
            prompt_tokens, output_tokens = request.prompt_tokens or 0, request.output_tokens or 0
            past = last_tokens if request.reused_tokens is None else request.reused_tokens
            past = past if last_tokens else 0
            prefill_s = prefill.constant_s + prefill.marginal_s(prompt_tokens - past, past)
            held_tokens = prompt_tokens + output_tokens / 2
            decode_s = output_tokens * decode.step_s(_BATCH, _BATCH * held_tokens)
            busy_s += prefill_s + decode_s / _BATCH
            held_token_s += last_tokens * request.gap_s + held_tokens * (prefill_s + decode_s)
            last_tokens = prompt_tokens
            request = script.next(_NOTHING_SAID)
    kv_s = held_token_s / profile.kv_capacity_tokens if kv else 0.0
    return max(busy_s, kv_s) / count


# --- Measuring ------------------------------------------------------------------------------------


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

    @property
    def key(self) -> tuple[str, str, float, int, str]:
        return self.scene, self.engines, self.load, self.seed, self.system


@dataclass(frozen=True, slots=True)
class Cell:
    """A scene's systems under the same conversations."""

    scene: Scene
    engines: str
    load: float
    seed: int


def measure(cell: Cell, systems: Sequence[str], data: Path | None) -> Iterator[Figures]:
    """Simulate, one after the other.

    Args:
        systems: the scene's systems that are shown.
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


# --- Tables and the picture -----------------------------------------------------------------------


_BASE = "collocated"
# What each is compared with.
_OTHERS = {
    "elastic": ("conserve", "collocated", "affinity"),
    "elastic_parking": ("parking", "collocated_parking", "affinity"),
}
_COLOURS = {
    "conserve": "lightsteelblue",
    "collocated": "tab:gray",
    "affinity": "tab:brown",
    "elastic": "tab:blue",
}


def show(found: Sequence[Figures], experiment: Experiment) -> None:
    """Print, for each scene, what came out, and ratios to collocated engines."""
    for scene, of_it in group(found, lambda one: one.scene).items():
        title = f"{scene}: TTFET p50, p95 in s; last-turn TBT p95 in ms; refused"
        _table(title, of_it, _absolute, experiment)
        if all(one.system != _BASE for one in of_it):
            title = f"{scene}: TTFET over five times the unloaded one, or refused"
            _table(title, of_it, _late, experiment)
        else:
            title = f"{scene}: TTFET p95 and last-turn TBT p95, over collocated"
            _table(title, of_it, partial(_relative, found=of_it), experiment)


def show_against_best(found: Sequence[Figures], experiment: Experiment) -> None:
    """Print how far `elastic` is behind the best of the others, or ahead; alone, and as shipped."""
    for system in _OTHERS:
        if compared := [one for one in found if one.system == system]:
            title = f"{system}: TTFET p95 over the best of the others', means over seeds"
            cell = partial(_over_best, found=found)
            _table(title, compared, cell, experiment, lambda one: one.scene)


def _table(
    title: str,
    found: Sequence[Figures],
    cell: Callable[[list[Figures]], str],
    experiment: Experiment,
    name: Callable[[Figures], str] = lambda one: one.system,
) -> None:
    columns, rows = pivot(found, lambda one: (one.engines, name(one)), lambda one: one.load, cell)
    experiment.show(title, ["engines", "", *columns], rows, names=2, box=SIMPLE_HEAD)


def over_best(ones: Sequence[Figures], found: Iterable[Figures]) -> float:
    """TTFET p95 over that of the best of the other systems under the same conversations.

    The best is one system: the one with the least geometric mean over the seeds. (By seed, the best
    of three is ahead of each of them by chance alone.)

    Args:
        ones: a system's, at one load, of each seed.
        found: all systems'.

    Returns:
        Where none has a p95, since more than a twentieth were refused by each: 1, or if it refused
        more than another, infinite; 0 where it alone has one.
    """
    names = _OTHERS[ones[0].system]
    rivals = [other for other in found if other.system in names]
    compared = [other for other in rivals if any(_same(one, other) for one in ones)]
    others = group(compared, lambda one: one.system)
    best_s = min((_ttfet_s(each) for each in others.values()), default=nan)
    own_s = _ttfet_s(ones)
    if own_s == best_s == inf:
        refused = sum(one.refused for one in ones)
        least = min(sum(one.refused for one in each) for each in others.values())
        return 1.0 if refused <= least else inf
    return own_s / best_s


def _ttfet_s(ones: Sequence[Figures]) -> float:
    return _gmean([one.ttfet_p95_s or inf for one in ones])


def draw(found: Sequence[Figures], path: Path) -> None:
    """TTFET and TBT over collocated engines', over the load: a row for each scene."""
    compared = [one for one in found if one.system in _COLOURS]
    if not compared:
        return
    scenes = list(dict.fromkeys(one.scene for one in compared))
    layouts = list(dict.fromkeys(one.engines for one in compared))
    picture = figure(4 * len(layouts), 2.7 * len(scenes))
    axes = picture.subplots(len(scenes), len(layouts), sharex=True, sharey=True, squeeze=False)
    for row, scene in enumerate(scenes):
        for column, engines in enumerate(layouts):
            panel = axes[row, column]
            here = [one for one in compared if (one.scene, one.engines) == (scene, engines)]
            for system, of_it in group(here, lambda one: one.system).items():
                by_load = dict(sorted(group(of_it, lambda one: one.load).items()))
                loads = list(by_load)
                ratios = [_ratios(ones, here) for ones in by_load.values()]
                look = {"color": _COLOURS[system], "marker": "o", "markersize": 3}
                panel.plot(loads, [min(one[0], 8.0) for one in ratios], label=system, **look)
                panel.plot(loads, [one[1] for one in ratios], linestyle=":", **look)
            panel.set_yscale("log")
            panel.set_ylim(0.15, 8)
            panel.set_yticks([0.2, 0.5, 1, 2, 5], labels=["0.2", "0.5", "1", "2", "5"])
            panel.minorticks_off()
            panel.set_title(f"{scene}, {engines}", fontsize=9)
    for panel in axes[-1]:
        panel.set_xlabel("share of saturation")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    picture.suptitle("TTFET p95 (lines) and last-turn TBT p95 (dots), over collocated engines'")
    picture.savefig(path, dpi=100)


def _over_best(ones: Sequence[Figures], found: Sequence[Figures]) -> str:
    ratio = over_best(ones, found)
    return "refuses" if ratio == inf else f"{ratio:.2f}" if ratio else "alone"


def _late(ones: Sequence[Figures]) -> str:
    return f"{fmean(one.over_slo for one in ones):.1%}"


def _absolute(ones: Sequence[Figures]) -> str:
    shown = []
    for times in ([one.ttfet_p50_s for one in ones], [one.ttfet_p95_s for one in ones]):
        known = [time for time in times if time is not None]
        shown.append(_number(fmean(known)) if len(known) == len(times) else "-")
    shown.append(_number(1000 * fmean(one.last_tbt_p95_s for one in ones)))
    refused = sum(one.refused for one in ones) / sum(one.conversations for one in ones)
    return " ".join(shown) + (f" ({refused:.0%})" if refused else "")


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _relative(ones: Sequence[Figures], found: Sequence[Figures]) -> str:
    ttfet, tbt = _ratios(ones, found)
    shown = "refuses" if ttfet == inf else "-" if math.isnan(ttfet) else f"{ttfet:.2f}"
    return f"{shown} {tbt:.2f}"


def _ratios(ones: Sequence[Figures], found: Sequence[Figures]) -> tuple[float, float]:
    """Geometric means over seeds; not a number where collocated engines refuse a twentieth."""
    ttfet, tbt = [], []
    for one in ones:
        base = next(other for other in found if _same(one, other) and other.system == _BASE)
        ttfet.append((one.ttfet_p95_s or inf) / base.ttfet_p95_s if base.ttfet_p95_s else nan)
        tbt.append(one.last_tbt_p95_s / base.last_tbt_p95_s)
    return _gmean(ttfet), _gmean(tbt)


def _gmean(ratios: Sequence[float]) -> float:
    known = [ratio for ratio in ratios if not math.isnan(ratio)]
    if not known:
        return nan
    if inf in known:
        return inf
    return math.exp(fmean(math.log(max(ratio, 1e-9)) for ratio in known))


def _same(one: Figures, other: Figures) -> bool:
    """Whether both systems had the same conversations."""
    return one.key[:-1] == other.key[:-1]


def _measure_all(cells: Sequence[Cell], experiment: Experiment) -> list[Figures]:
    """Simulate what the file does not have yet, and add it there; all of these cells' figures."""
    path = experiment.file("jsonl")
    known = [] if path is None or not path.exists() else path.read_text().splitlines()
    by = {one.key: one for one in (Figures(**json.loads(line)) for line in known)}
    found = []
    for cell in experiment.track(cells, "simulating"):
        scene = cell.scene
        keys = [(scene.name, cell.engines, cell.load, cell.seed, name) for name in scene.systems]
        missing = [key[-1] for key in keys if key not in by]
        for one in measure(cell, missing, experiment.options.data) if missing else ():
            by[one.key] = one
            if path is not None:
                with path.open("a") as file:
                    file.write(json.dumps(asdict(one)) + "\n")
        found += [by[key] for key in keys]
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    experiment = Experiment("elastic", __doc__, width=140, data=True)
    experiment.option("--seeds", "0,1", type=numbers, metavar="N,...")
    experiment.option("--engines", ",".join(ENGINES), "prefillers to decoders", metavar="P:D,...")
    about = "shares of saturation, of those that the scenes have (default: all)"
    experiment.option("--loads", None, about, type=numbers, metavar="SHARE,...")
    experiment.option("--scenes", "", "only those with this in their names", metavar="TEXT")
    options = experiment.parse(arguments)
    cells = [
        Cell(scene, engines, load, int(seed))
        for seed in options.seeds
        for scene in SCENES
        if options.scenes in scene.name and (options.data is not None or not scene.recorded)
        for engines in scene.engines
        if engines in options.engines.split(",")
        for load in scene.loads
        if not options.loads or load in options.loads
    ]
    found = _measure_all(cells, experiment)
    show(found, experiment)
    show_against_best(found, experiment)
    if path := experiment.file("png"):
        draw(found, path)


if __name__ == "__main__":
    main()
