"""Simulates the evaluation of the ConServe paper beside what it published.

All rows have one profile and one set of assumptions (sections 5.1 to 5.5 of *Observation, Not
Prediction*), with one prefiller and three decoders. Assumptions where the text is silent:

- The traces are not published. Conversations are drawn as for the preset ``conserve`` of
  `conserve_lab.workloads.synthetic`. Up to figure 11's 0.7 percentile all turns are later ones
  (section 5.2), so a conversation has 1 / 0.3 = 3.3 turns, and its 1,000 output tokens (section
  5.1) make 300 a turn.
- 1.634 conversations/s "holds the prefiller exactly at its saturation throughput": a conversation
  arrives when the first turn before it has been prefilled.
- Full disaggregation computes the whole prompt of every turn again, as it forfeits reuse across
  turns (section 5.2). The per-turn baseline moves the history to the prefiller.
- Nothing is rejected: turns wait however long.
- KV is loaded within an engine's step, as LMCache's in-process connector for vLLM does.
- Latencies exclude gaps between turns; the baseline is the geometric mean of conversations that run
  alone. Tokens per joule count every turn's whole prompt and its output.
- All runs have the same number of conversations. Beyond saturation, figures depend on it.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any, Literal

from rich.box import SIMPLE_HEAD

from autoscale.capacity.profile import Profile, ProfileError, load_profile
from conserve_lab.compare import labels
from conserve_lab.report import Report
from conserve_lab.simulate.costs import Costs
from conserve_lab.simulate.run import Baseline, EngineCounts, make_system, simulate
from conserve_lab.workloads import PRESETS, Arrivals, Spread, Workload, synthetic
from conserve_lab.workloads.plan import Arriving
from experiments.harness import Experiment, at_least_1

SHAPE = replace(
    PRESETS["conserve"],
    turns=Spread(2, 1 / 0.3, 10),
    output_tokens=Spread(60, 300, 1_800),
)
RATES = (0.5, 0.75, 1.0, 1.25, 1.5)
SATURATION = 1.634
ALL_RATES = (*RATES, SATURATION)
WRONG = (0.0, 0.05, 0.1, 0.5)
_AMPD_WRONG = 0.1
_CAPPED_W = 200.0

_ENGINES = EngineCounts(prefillers=1, decoders=3)
_CAPPED = EngineCounts(prefillers=1, decoders=3, decoder_cap_w=_CAPPED_W)
# Nothing is rejected: turns wait however long.
_ALL: dict[str, Any] = {"transfers_block": True, "queue_limit": 10**9, "queue_timeout_s": 1e9}
_OPTIONS: dict[str, dict[str, Any]] = {
    "conserve": _ALL,
    "collocated": _ALL,
    "full_disaggregation": _ALL | {"history": "recomputed"},
    "per_turn": _ALL | {"history": "moved", "wrong_decision_rate": _AMPD_WRONG},
}

Unit = Literal["times", "change", "share", "tokens/J"]
TTFET, LAST_TBT, E2E = "ttfet_less_gaps", "last_tbt", "e2e_less_gaps"
JUDGED = (TTFET, LAST_TBT, E2E)


@dataclass(frozen=True, slots=True)
class Row:
    """A published figure and its simulation; a ``relation`` other than ``=`` is a bound."""

    figure: str
    what: str
    published: float
    simulated: float
    unit: Unit = "times"
    relation: Literal["=", "<=", ">=", ">"] = "="

    @property
    def difference(self) -> float:
        return self.simulated - self.published

    @property
    def within(self) -> bool | None:
        """Whether a bound is kept; None where the text gives a value."""
        if self.relation == "=":
            return None
        return {
            "<=": self.simulated <= self.published,
            ">=": self.simulated >= self.published,
            ">": self.simulated > self.published,
        }[self.relation]


@dataclass(frozen=True, slots=True)
class Reproduction:
    """All rows, and the reports of figure 10."""

    rows: list[Row]
    by_rate: Mapping[tuple[str, float], Report]


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one system; ``wrong`` is the share of wrong decisions, None the system's own."""

    system: str
    rate_per_s: float = SATURATION
    wrong: float | None = None
    engines: EngineCounts = _ENGINES


BY_RATE = [Run(system, rate_per_s) for rate_per_s, system in product(ALL_RATES, _OPTIONS)]
BY_WRONG = [Run("per_turn", wrong=wrong) for wrong in WRONG]
CAPPED = [Run(system, engines=_CAPPED) for system in ("conserve", "collocated")]


def reproduce(
    profile: Profile,
    conversations: int,
    seed: int = 0,
    track: Callable[[Collection[Run]], Iterable[Run]] = iter,
) -> Reproduction:
    """Simulate figures 10, 12 and 13; the profile needs power under caps of 300 W and 200 W.

    Raises `ProfileError`, `SimulationError` or `WorkloadError`.

    Args:
        track: yields the runs, and shows how many are done.
    """
    # Fail now if figure 13, which comes last, cannot be simulated.
    for cap_w in (None, _CAPPED_W):
        profile.power_at(cap_w)
    runs = _Runs(profile, conversations, seed)
    found = {run: runs.report(run) for run in track([*BY_RATE, *BY_WRONG, *CAPPED])}
    by_rate = {(run.system, run.rate_per_s): found[run] for run in BY_RATE}
    by_wrong = {run.wrong: found[run] for run in BY_WRONG}
    capped = {run.system: found[run] for run in CAPPED}
    rows = [
        *_figure_10(by_rate, runs.baseline),
        *_figure_12(by_wrong, by_rate["conserve", SATURATION]),
        *_figure_13(by_rate, capped),
    ]
    return Reproduction(rows, by_rate)


@dataclass(slots=True)
class _Runs:
    profile: Profile
    conversations: int
    seed: int
    baseline: Baseline = field(init=False)

    def __post_init__(self) -> None:
        system = make_system("conserve", self.profile, _ENGINES, **_OPTIONS["conserve"])
        self.baseline = Baseline.of(system, self._workload(1.0))

    def report(self, run: Run) -> Report:
        options = dict(_OPTIONS[run.system])
        if run.wrong is not None:
            options["wrong_decision_rate"] = run.wrong
        system = make_system(run.system, self.profile, run.engines, **options)
        workload = self._workload(run.rate_per_s)
        arrivals = {"pattern": "poisson", "rate_per_s": run.rate_per_s, "concurrency": None}
        if run.rate_per_s == SATURATION:
            # Collocated systems have no prefiller, but get the same arrivals.
            workload = saturating(workload, Costs.of(self.profile, "prefiller"))
            arrivals["pattern"] = "saturating"
        return simulate(
            system,
            workload,
            self.profile,
            self.baseline,
            described={"shape": asdict(SHAPE), "seed": self.seed},
            arrivals=arrivals,
        )

    def _workload(self, rate_per_s: float) -> Workload:
        return synthetic(
            SHAPE,
            conversations=self.conversations,
            arrivals=Arrivals("poisson", rate_per_s, self.seed),
            # Prompts are never built, so any token ids will do.
            vocabulary=range(1_000, 4_000),
            seed=self.seed,
        )


def saturating(workload: Workload, prefiller: Costs) -> Workload:
    """Return the conversations, each arriving when the first turn before it is prefilled."""

    def arrive() -> Iterator[Arriving]:
        at_s = 0.0
        for (_, script), (_, sizes) in zip(workload, workload, strict=True):
            yield at_s, script
            # Sizes come from a second copy, as a script yields its turns only once.
            first = sizes.next(None)
            if first is not None and first.prompt_tokens is not None:
                at_s += cold_prefill_s(first.prompt_tokens, prefiller)

    return Workload(workload.name, workload.counts, arrive)


def cold_prefill_s(tokens: int, costs: Costs) -> float:
    """Return the time that a prompt takes alone on a prefiller, in chunks."""
    seconds, past = costs.prefill_s, 0
    while past < tokens:
        chunk = min(costs.batched_tokens, tokens - past)
        added_s = chunk * (costs.per_token_s + costs.per_pair_s * (chunk + 2 * past))
        seconds += max(costs.step_s, added_s) if past else added_s
        past += chunk
    return seconds


# --- Figures --------------------------------------------------------------------------------------


def _value(report: Report, metric: str, statistic: str) -> float:
    return float(getattr(report.result.latencies[metric], statistic))


def _change(ours: float, theirs: float) -> float:
    return ours / theirs - 1


def _change_of(ours: Report, theirs: Report, metric: str, statistic: str) -> float:
    return _change(_value(ours, metric, statistic), _value(theirs, metric, statistic))


def tokens_per_j(report: Report) -> float:
    """Return tokens of all turns' whole prompts and outputs per joule of all engines."""
    result = report.result
    assert result.energy_j is not None
    return result.total_tokens_per_s * result.duration_s / result.energy_j


def _figure_10(reports: Mapping[tuple[str, float], Report], baseline: Baseline) -> Iterator[Row]:
    alone_s = baseline.unloaded.baseline_s

    def times(name: str, metric: str, statistic: str = "gmean", rate: float = SATURATION) -> float:
        return _value(reports[name, rate], metric, statistic) / alone_s[metric]

    def reduction(statistic: str) -> float:
        pairs = [(reports["conserve", rate], reports["per_turn", rate]) for rate in ALL_RATES]
        return min(_change_of(ours, theirs, TTFET, statistic) for ours, theirs in pairs)

    row = partial(Row, "10")
    yield row(
        "TTFET p95, ConServe against per turn, best rate", -0.5108, reduction("p95"), "change"
    )
    yield row("TTFET gmean, the same", -0.1917, reduction("gmean"), "change")
    yield row("TTFET gmean, ConServe, at 1.634/s", 2.53, times("conserve", TTFET))
    yield row("TTFET gmean, full disaggregation", 18.78, times("full_disaggregation", TTFET))
    yield row("last-turn TBT gmean, ConServe", 2.49, times("conserve", LAST_TBT))
    yield row(
        "last-turn TBT gmean, full disaggregation", 1.35, times("full_disaggregation", LAST_TBT)
    )
    yield row("last-turn TBT p95, collocated", 7.52, times("collocated", LAST_TBT, "p95"))
    over = times("collocated", LAST_TBT, "p95") / times("conserve", LAST_TBT, "p95")
    yield row("the same over ConServe's", 1.72, over)
    over = times("full_disaggregation", E2E) / times("conserve", E2E)
    yield row("end to end gmean, full disaggregation over ConServe", 4.7, over)
    calm = [rate for rate in RATES if rate <= 1.25]
    yield row(
        "gmeans up to 1.25/s, all but full disaggregation: largest",
        2.0,
        max(
            times(name, metric, rate=rate)
            for name in ("conserve", "per_turn", "collocated")
            for metric in JUDGED
            for rate in calm
        ),
        relation="<=",
    )
    yield row(
        "TTFET, E2E gmean, full disaggregation, any rate: least",
        10.0,
        min(times("full_disaggregation", m, rate=rate) for m in (TTFET, E2E) for rate in ALL_RATES),
        relation=">",
    )

    def violations(name: str, *metrics: str) -> list[float]:
        ours = [reports[name, rate].result.violations for rate in ALL_RATES]
        return [one[metric] for one in ours for metric in metrics]

    saturated = {name: reports[name, SATURATION].result.violations for name in _OPTIONS}
    ttfet = {name: violated[TTFET] for name, violated in saturated.items()}
    tbt = {name: violated[LAST_TBT] for name, violated in saturated.items()}
    row = partial(Row, "10", published=0.0, unit="share")
    worst = max(violations("conserve", *JUDGED))
    yield row("violations, ConServe, any metric and rate: largest", simulated=worst)
    above = partial(row, relation=">")
    yield above("violations of TTFET, collocated, at 1.634/s", simulated=ttfet["collocated"])
    yield above("violations of last-turn TBT, collocated", simulated=tbt["collocated"])
    yield above("violations of TTFET, per turn", simulated=ttfet["per_turn"])
    yield row("violations of last-turn TBT, per turn", simulated=tbt["per_turn"])
    yield row(
        "violations, full disaggregation, TTFET and E2E, any rate: least",
        published=1.0,
        simulated=min(violations("full_disaggregation", TTFET, E2E)),
    )
    said = "violations of last-turn TBT, full disaggregation"
    yield row(said, simulated=tbt["full_disaggregation"])


def _figure_12(by_wrong: Mapping[float | None, Report], conserve: Report) -> Iterator[Row]:
    row = partial(Row, "12")
    never, few, some, half = (by_wrong[wrong] for wrong in (0.0, 0.05, _AMPD_WRONG, 0.5))
    over = _value(never, TTFET, "gmean") / _value(conserve, TTFET, "gmean")
    yield row("TTFET gmean, no wrong decision over ConServe", 1.0, over)
    yield row("violations of TTFET, 5 % wrong", 0.078, few.result.violations[TTFET], "share")
    yield row("violations of E2E, 5 % wrong", 0.063, few.result.violations[E2E], "share")
    yield row("violations of TTFET, 50 % wrong", 0.5, half.result.violations[TTFET], "share", ">")
    over = _value(half, LAST_TBT, "gmean") / _value(never, LAST_TBT, "gmean")
    yield row("last-turn TBT gmean, 50 % wrong over none", 1.0, over)
    change = _change(some.result.duration_s, conserve.result.duration_s)
    yield row("time to drain, 10 % wrong against ConServe", 0.15, change, "change")
    change = _change(tokens_per_j(conserve), tokens_per_j(some))
    yield row("tokens/J, ConServe against 10 % wrong", 0.0751, change, "change")
    yield row("tokens/J, 50 % wrong", 58.0, tokens_per_j(half), "tokens/J")


def _figure_13(
    reports: Mapping[tuple[str, float], Report], capped: Mapping[str, Report]
) -> Iterator[Row]:
    row = partial(Row, "13")
    free, low = reports["conserve", SATURATION], capped["conserve"]
    change = _change(tokens_per_j(low), tokens_per_j(free))
    yield row("tokens/J, ConServe, decoders at 200 W against 300 W", 0.2275, change, "change")
    for metric, label in ((TTFET, "TTFET"), (LAST_TBT, "last-turn TBT"), (E2E, "end to end")):
        yield row(f"{label} p95, the same", 0.0, _change_of(low, free, metric, "p95"), "change")
    collocated = reports["collocated", SATURATION]
    change = _change_of(capped["collocated"], collocated, TTFET, "p95")
    yield row("TTFET p95, collocated, three at 200 W", 0.1115, change, "change")


# --- What is shown --------------------------------------------------------------------------------


def show(found: Reproduction, profile: Profile, experiment: Experiment) -> None:
    rows = []
    for row in found.rows:
        relation = "" if row.relation == "=" else f"{row.relation} "
        if row.within is None:
            last = _said(row.difference, row.unit, signed=True)
        else:
            last = "[green]as said[/]" if row.within else "[red]not so[/]"
        published = relation + _said(row.published, row.unit)
        rows.append((row.figure, row.what, published, _said(row.simulated, row.unit), last))
    experiment.show(
        f"ConServe's figures, simulated on profile {profile.name}",
        ("fig.", "", "published", "simulated", "difference"),
        rows,
        names=2,
        caption="latencies over those of conversations that run alone, gaps not counted",
        box=SIMPLE_HEAD,
    )


def _said(value: float, unit: Unit, *, signed: bool = False) -> str:
    if unit in ("change", "share"):
        if signed:
            return f"{value * 100:+.1f} pp"
        return f"{value:+.1%}" if unit == "change" else f"{value:.1%}"
    return f"{value:{'+' if signed else ''}.2f}" + ("x" if unit == "times" else "")


def main(arguments: Sequence[str] | None = None) -> None:
    experiment = Experiment("paper", __doc__, width=110, seed=0)
    experiment.option("--profile", "a40-qwen3-0.6b", "a profile's file or name")
    experiment.option("--conversations", 300, "of each run", type=at_least_1)
    options = experiment.parse(arguments)
    try:
        profile = load_profile(options.profile)
        found = reproduce(profile, options.conversations, options.seed, experiment.track)
    except ProfileError as error:
        experiment.fail(error, 2)
    show(found, profile, experiment)
    experiment.save(
        [asdict(row) | {"difference": row.difference, "within": row.within} for row in found.rows]
    )
    if options.out is not None:
        from conserve_lab.plots import draw_all

        reports = list(found.by_rate.values())
        draw_all(reports, labels(reports), options.out)


if __name__ == "__main__":
    main()
