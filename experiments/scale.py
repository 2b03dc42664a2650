"""ConServe and other systems at the scale of the papers, simulated.

Closed loops of programs as in ThunderAgent's evaluation, and MARS's regimes of programs that
arrive; each system's rules under the same load, and what the papers claim beside what came out.
Without recorded sessions (``--data``) their scene is left out. ``--sweep`` varies ThunderAgent's
interval and decay instead.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.box import SIMPLE_HEAD

from autoscale.capacity.profile import Profile, load_profile
from conserve_lab.records import TurnRecord
from conserve_lab.simulate.clients import Clients
from conserve_lab.simulate.run import EngineCounts, make_cluster, make_system
from conserve_lab.simulate.system import System
from conserve_lab.workloads import (
    Arrivals,
    Changes,
    Latency,
    Shape,
    Spread,
    Workload,
    recorded,
    synthetic,
)
from experiments.claims import Claim, show_claims
from experiments.harness import Experiment, at_least_1, figure, group, numbers, pivot

# As in ConServe's paper; the others have four collocated engines.
_CLOSED_ENGINES = EngineCounts(prefillers=1, decoders=3)
# As MARS's evaluation. ConServe's engine decodes and prefills (``prefillers=0``).
_OPEN_ENGINES = EngineCounts(prefillers=0, decoders=1)
PROFILE = "h100-qwen3-8b"
_VOCABULARY = range(1_000, 4_000)
# More than begin in any run of a closed loop.
_PROGRAMS, _SESSIONS = 1_000, 1_000


@dataclass(frozen=True, slots=True)
class Contender:
    """A system, and how it is set here.

    Attributes:
        system: its name, as `conserve_lab.simulate.run.make_system` knows it.
        options: fields of `conserve_lab.simulate.System`.
        host_tokens_each: room in host memory, for each engine; 0: the system's default.
    """

    label: str
    system: str
    options: dict[str, Any] = field(default_factory=dict)
    host_tokens_each: int = 0


# 256 GB: an eighth of the 2 TiB that servers with eight H100s have (AWS's p5.48xlarge), at 147,456
# bytes a token. The default is a third of that.
_HOST_TOKENS = 1_750_000
# Engines that are told of no end keep the KV of conversations that have ended until its room is
# needed, whoever uses them. A turn waits for room for half an hour, as in ThunderAgent.
_ALIKE: dict[str, Any] = {"keeps_ended": True, "queue_timeout_s": 1800.0}

CONTENDERS: tuple[Contender, ...] = tuple(
    replace(one, options=_ALIKE | one.options)
    for one in (
        Contender("vllm", "vllm"),
        Contender("affinity", "affinity"),
        Contender("ttl, 2 s", "ttl"),
        Contender("ttl, 30 s", "ttl", {"ttl_s": 30.0}),
        Contender("attained", "attained"),
        Contender("thunderagent", "thunderagent"),
        Contender("thunderagent, f = 1", "thunderagent", {"decay": 1.0}),
        Contender("conserve", "conserve"),
        Contender("pausing", "pausing"),
        Contender("parking", "parking"),
        Contender("parking, 256 GB", "parking", host_tokens_each=_HOST_TOKENS),
        # What `conserve serve` starts.
        Contender("as shipped", "elastic_parking"),
        Contender("as shipped, 256 GB", "elastic_parking", host_tokens_each=_HOST_TOKENS),
    )
)
# ThunderAgent's figure 6b: the interval with its decay, and the decay with its interval.
SWEEP: tuple[Contender, ...] = tuple(
    Contender(
        f"every {interval_s:g} s, f = {decay:g}^-t",
        "thunderagent",
        _ALIKE | {"interval_s": interval_s, "decay": decay},
    )
    for interval_s, decay in (
        *((interval_s, 2.0) for interval_s in (1.0, 2.0, 5.0, 10.0, 20.0)),
        *((5.0, decay) for decay in (1.0, 1.1, 1.5, 4.0)),
    )
)


def _coding(tools: Latency) -> Shape:
    """Coding agents, as SWE-agent's on SWE-bench (ThunderAgent, figure 4).

    The paper's text has no lengths (its figures are images): all of these are assumed. They make a
    mean context of some 30,000 tokens, so that 96 programs are twice what four engines of 350,000
    tokens hold, and 24 half.
    """
    return Shape(
        turns=Spread(15, 40, 90),
        first_prompt_tokens=Spread(4_000, 8_000, 16_000),
        append_tokens=Spread(100, 900, 6_000),
        output_tokens=Spread(30, 200, 1_200),
        tool_latency=tools,
    )


def regime(volume_tokens: int) -> Shape:
    """One of MARS's input-length regimes (section 6.1).

    With some 12 turns, of which each adds 700 tokens, they differ in the first prompt alone
    ("primarily in context size rather than [...] task difficulty"). Turns, outputs and tools are
    assumed, and tools take no CPU here.

    Args:
        volume_tokens: of all prompts of a program together, on average.
    """
    first = round((volume_tokens - 66 * 700) / 12)
    return Shape(
        turns=Spread(4, 12, 24),
        first_prompt_tokens=Spread(first // 3, first, 3 * first),
        append_tokens=Spread(100, 500, 3_000),
        output_tokens=Spread(30, 200, 1_200),
        tool_latency=Latency(2.0, 15.0),
    )


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """A fixed number of programs at a time (ThunderAgent, section 5): one ends, one begins.

    Attributes:
        shape: of drawn programs; None: recorded sessions.
        seconds: how long it lasts; the first third is not counted, and programs begin evenly over
            the first tenth.
    """

    name: str
    shape: Shape | None = None
    seconds: float = 1800.0

    def workload(self, data: Path | None, seed: int) -> Workload:
        """Programs in the order in which they begin.

        Recorded lengths are a quarter, so that a mean context is as long as the drawn ones', and
        gaps at most a minute; sub-agents are programs of their own.
        """
        arrivals = Arrivals("even", 1.0)
        if self.shape is not None:
            return synthetic(
                self.shape,
                conversations=_PROGRAMS,
                arrivals=arrivals,
                vocabulary=_VOCABULARY,
                seed=seed,
            )
        assert data is not None
        return recorded(
            data,
            sessions=_SESSIONS,
            arrivals=arrivals,
            vocabulary=_VOCABULARY,
            changes=Changes(scale_tokens=0.25, max_gap_s=60.0, max_context_tokens=131_072),
            seed=seed,
        )


CLOSED: tuple[ClosedLoop, ...] = (
    # Local, light tools have a low variance; remote services' tails are of tens of seconds and more
    # (ThunderAgent, appendix C). The percentiles are assumed.
    ClosedLoop("quick tools", _coding(Latency(1.0, 3.0))),
    ClosedLoop("remote tools", _coding(Latency(3.0, 60.0))),
    ClosedLoop("recorded"),
)


@dataclass(frozen=True, slots=True)
class Arriving:
    """Programs that arrive at random intervals, whether others have ended or not (MARS, 6.3).

    Attributes:
        programs: how many; all are served to their ends.
    """

    name: str
    shape: Shape
    programs: int = 300

    def workload(self, rate_per_s: float, seed: int) -> Workload:
        return synthetic(
            self.shape,
            conversations=self.programs,
            arrivals=Arrivals("poisson", rate_per_s, seed),
            vocabulary=_VOCABULARY,
            seed=seed,
        )


# The means that the paper gives.
REGIMES: tuple[Arriving, ...] = (
    Arriving("ILR-1", regime(125_000)),
    Arriving("ILR-2", regime(167_000)),
    Arriving("ILR-3", regime(220_000)),
    Arriving("ILR-4", regime(263_000)),
)


# --- Measuring ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Figures:
    """Tells what came out.

    Attributes:
        load: number of programs at a time, or arrivals a second.
        tokens_per_s, steps_per_min: output tokens, and turns that ended.
        found: of what later turns repeat, the share that no engine had to compute.
        latency_s: mean time of a turn, from when it was sent.
        first_token_s: the part of it until the first token.
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
    first_token_s: float
    program_s: float | None
    failed: int
    preemptions: int
    busy: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """One simulation: of a closed loop of programs, or of arrivals at a rate."""

    scene: ClosedLoop | Arriving
    contender: Contender
    load: float
    engines: EngineCounts
    data: Path | None
    seed: int


def measure(run: Run) -> Figures:
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
        first_token_s=fmean((one.first_token_s or one.ended_s) - one.sent_s for one in ended),
        program_s=fmean(program_s) if program_s else None,
        failed=len(records) - len(ended),
        preemptions=sum(engine.preemptions for engine in engines),
        busy=tuple((engine.busy_prefill_s + engine.busy_decode_s) / whole_s for engine in engines),
    )


# --- What papers claim ----------------------------------------------------------------------------

_SERVING, _OVER_CONTINUUM, _ROLLOUT, _MARS = (1.48, 3.58), (1.17, 3.31), (1.79, 3.92), (1.44, 5.94)
_OURS = (
    "conserve", "pausing", "parking", "parking, 256 GB", "as shipped", "as shipped, 256 GB",
)  # fmt: skip
# What MARS is compared with in its paper, and of what is simulated here.
_MARS_OTHERS = ("vllm", "affinity", "ttl, 2 s", "ttl, 30 s", "attained")


def claims(found: Iterable[Figures]) -> list[Claim]:
    """List the papers' claims, each with its ratios where they have been simulated."""
    by = {(one.scene, one.load, one.system): one for one in found}
    scenes = list(dict.fromkeys(scene for scene, _, _ in by if not _arrives(scene)))

    def claim(
        source: str, what: str, range_: tuple[float, float], ratios: dict[str, float]
    ) -> Claim:
        low, high = range_
        published = f"{low:.2f} to {high:.2f}" if low != high else f"> {low:g}"
        return Claim(source, what, published, low, ratios)

    def over(system: str, others: Iterable[str], programs: int) -> dict[str, float]:
        """Return throughput over that of the best of the others, for each scene."""
        ratios = {}
        for scene in scenes:
            one = by.get((scene, programs, system))
            rivals = [
                by[key].steps_per_min for name in others if (key := (scene, programs, name)) in by
            ]
            if one and rivals:
                ratios[scene] = one.steps_per_min / max(rivals)
        return ratios

    def sooner(system: str) -> dict[str, float]:
        """Return the strongest of MARS's baselines' mean time of programs over a system's."""
        gains = {}
        for scene, rate, name in by:
            own = by[scene, rate, name].program_s
            keys = [(scene, rate, baseline) for baseline in _MARS_OTHERS]
            others = [s for key in keys if key in by and (s := by[key].program_s)]
            if name == system and _arrives(scene) and own and others:
                gains[f"{scene} at {rate:g}/s"] = min(others) / own
        return gains

    vllm, affinity = "over vLLM, 96 programs", "over affinity, 144 programs"
    rivals = {system for _, _, system in by if system not in _OURS}
    listed = [
        claim("ThunderAgent, 5.2", f"ThunderAgent {vllm}", _SERVING,
              over("thunderagent", ["vllm"], 96)),
        claim("the same", f"with f = 1 (its code's default) {vllm}", _SERVING,
              over("thunderagent, f = 1", ["vllm"], 96)),
        claim("the same", "ThunderAgent over Continuum, 96 programs", _OVER_CONTINUUM,
              over("thunderagent", ["ttl, 2 s"], 96)),
        claim("ThunderAgent, table 2", f"rollout: ThunderAgent {affinity}", _ROLLOUT,
              over("thunderagent", ["affinity"], 144)),
    ]  # fmt: skip
    for system in _OURS:
        best = f"{system} over the best of the others, 96 programs"
        serving = over(system, ["vllm"], 96)
        listed.append(claim("the same, of ConServe", f"{system} {vllm}", _SERVING, serving))
        listed.append(claim("of ConServe", best, (1.0, 1.0), over(system, rivals, 96)))
    for system in ("thunderagent, f = 1", *_OURS):
        what = f"{system}: programs' mean time, the best of MARS's baselines' over its own"
        listed.append(claim("MARS, 6.3, of others", what, _MARS, sooner(system)))
    return listed


# --- Tables and the picture -----------------------------------------------------------------------

_COLOURS = {
    "vllm": "tab:gray",
    "affinity": "tab:brown",
    "ttl, 2 s": "tab:olive",
    "ttl, 30 s": "tab:green",
    "attained": "tab:pink",
    "thunderagent": "tab:red",
    "thunderagent, f = 1": "tab:orange",
    "conserve": "lightsteelblue",
    "pausing": "tab:cyan",
    "parking": "tab:blue",
    "parking, 256 GB": "navy",
    "as shipped": "mediumorchid",
    "as shipped, 256 GB": "indigo",
}


def _arrives(scene: str) -> bool:
    """Whether a scene is one of MARS's regimes, and no closed loop."""
    return scene.startswith("ILR")


def _latency(one: Figures) -> str:
    shown = "-" if one.program_s is None else f"{one.program_s:,.0f} s {one.found:4.0%}"
    return shown + (f", {one.failed} failed" if one.failed else "")


_Cell = Callable[[Figures], str]
_OPEN: dict[str, _Cell] = {"a program's mean time, its tools' included, and hits": _latency}
_CLOSED: dict[str, _Cell] = {
    "output tokens/s, and of what is repeated, what was found": lambda one: (
        f"{one.tokens_per_s:,.0f} {one.found:4.0%}"
    ),
    "steps/min, and a turn's mean time, s: to its first token + decoding": lambda one: (
        f"{one.steps_per_min:,.0f} {one.first_token_s:5.1f} + "
        f"{one.latency_s - one.first_token_s:4.1f}"
    ),
}
_REFUSED: dict[str, _Cell] = {"turns refused": lambda one: f"{one.failed:,}"}


def show(found: Sequence[Figures], experiment: Experiment) -> None:
    """Print tables for each scene: a row for each system, a column for each load."""
    for scene, ones in group(found, lambda one: one.scene).items():
        tables, unit = (_OPEN, "/s") if _arrives(scene) else (_CLOSED, "")
        if not _arrives(scene) and any(one.failed for one in ones):
            tables = tables | _REFUSED
        for title, cell in tables.items():
            _show(f"{scene}: {title}", ones, unit, cell, experiment)


def _show(
    title: str, ones: Sequence[Figures], unit: str, cell: _Cell, experiment: Experiment
) -> None:
    columns, rows = pivot(
        ones,
        lambda one: (one.system,),
        lambda one: f"{one.load:g}{unit}",
        lambda here: cell(here[0]),
    )
    experiment.show(title, ["system", *columns], rows, box=SIMPLE_HEAD)


def draw(found: Sequence[Figures], path: Path) -> None:
    """Throughput and hits over the number of programs, a line for each system."""
    scenes = list(dict.fromkeys(one.scene for one in found))
    picture = figure(4.6 * len(scenes), 7)
    axes = picture.subplots(2, len(scenes), sharex=True, squeeze=False)
    for column, scene in enumerate(scenes):
        for system, colour in _COLOURS.items():
            line = [one for one in found if (one.scene, one.system) == (scene, system)]
            loads = [one.load for one in line]
            look = {"color": colour, "marker": "o", "markersize": 3, "label": system}
            axes[0, column].plot(loads, [one.tokens_per_s for one in line], **look)
            axes[1, column].plot(loads, [100 * one.found for one in line], **look)
        axes[0, column].set_title(scene)
        axes[0, column].set_ylim(bottom=0)
        axes[1, column].set_ylim(0, 100)
        axes[1, column].set_xlabel("programs at a time")
    axes[0, 0].set_ylabel("output tokens/s")
    axes[1, 0].set_ylabel("found of what is repeated, %")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False)
    picture.savefig(path, dpi=110)


def sweep(programs: int, seed: int, experiment: Experiment) -> None:
    """Simulate ThunderAgent with other intervals and decays, on drawn programs."""
    runs = [
        Run(scene, one, programs, _CLOSED_ENGINES, None, seed)
        for scene in CLOSED
        if scene.shape is not None
        for one in SWEEP
    ]
    found = experiment.on_all_cores(measure, runs)
    columns, rows = pivot(
        found,
        lambda one: (one.system,),
        lambda one: one.scene,
        lambda here: f"{here[0].steps_per_min:,.0f} {here[0].found:4.0%}",
    )
    title = f"ThunderAgent's interval and decay, {programs} programs: steps/min, and found"
    experiment.show(title, ["", *columns], rows, box=SIMPLE_HEAD)
    experiment.save(found)


def main(arguments: Sequence[str] | None = None) -> None:
    experiment = Experiment("scale", __doc__, width=118, seed=0, data=True)
    about = "how many programs at a time; 0: none"
    experiment.option("--programs", "24,48,96,120,144", about, type=numbers, metavar="N,...")
    about = "of MARS's regimes, programs a second; 0: none"
    experiment.option("--rates", "0.1,0.2,0.33,0.5", about, type=numbers, metavar="RATE,...")
    about = "vary ThunderAgent's interval and decay, with this number of programs"
    experiment.option("--sweep", None, about, type=at_least_1, metavar="N")
    options = experiment.parse(arguments)
    if options.sweep is not None:
        sweep(options.sweep, options.seed, experiment)
        return
    scenes = [one for one in CLOSED if one.shape is not None or options.data is not None]
    cases: list[tuple[ClosedLoop | Arriving, float, EngineCounts]] = [
        *((scene, load, _CLOSED_ENGINES) for scene in scenes for load in options.programs if load),
        *((regime, rate, _OPEN_ENGINES) for regime in REGIMES for rate in options.rates if rate),
    ]
    runs = [
        Run(scene, one, load, engines, options.data, options.seed)
        for scene, load, engines in cases
        for one in CONTENDERS
    ]
    found = experiment.on_all_cores(measure, runs)
    show(found, experiment)
    show_claims("What papers claim, and what came out", claims(found), experiment)
    experiment.save(found)
    closed = [one for one in found if not _arrives(one.scene)]
    if closed and (path := experiment.file("png")):
        draw(closed, path)


if __name__ == "__main__":
    main()
