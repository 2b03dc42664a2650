"""Several systems' runs against each other: ratios, and how sure they are.

Intervals are percentile bootstraps. Turns of one conversation are not independent of each other, so
conversations are drawn, with all their turns. Where two runs had the same conversations, the same
ones are drawn for both (paired), out of those that have the metric in both.
"""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from conserve_lab.latencies import LABELS, Samples
from conserve_lab.report import Report, seconds
from conserve_lab.rounds import ROUND

STATISTICS = ("gmean", "p50", "p95")
DRAWS = 1000
_SHOWN = ("ttft_first", "ttft_later", "tbt", "ttfet", "last_tbt", "e2e", "e2e_less_gaps", "latency")
_CONFIDENCE = (2.5, 97.5)


@dataclass(frozen=True, slots=True)
class Ratio:
    """A system's latency against the baseline's; below 1 is better.

    With rounds or starts, `baseline_s`, `value_s` and `ratio` are medians over them.

    Attributes:
        low, high: ends of the ratio's 95 % interval.
        kind: ``paired`` by conversation, ``unpaired``, or ``rounds`` or ``starts`` that alternated.
        count: number of conversations (of the system that has fewer), or of rounds or starts.
    """

    metric: str
    statistic: str
    baseline_s: float
    value_s: float
    ratio: float
    low: float
    high: float
    kind: str
    count: int


def ratios(
    baseline: Samples, other: Samples, *, paired: bool, draws: int = DRAWS, seed: int = 0
) -> list[Ratio]:
    """Ratios of every metric that both have, paired if the two ran the same conversations."""
    found = []
    for metric in LABELS:
        ours, theirs = baseline.get(metric, {}), other.get(metric, {})
        if paired:
            both = sorted(ours.keys() & theirs.keys())
            ours, theirs = {c: ours[c] for c in both}, {c: theirs[c] for c in both}
        if ours and theirs:
            rng = np.random.default_rng(seed)
            found += _bootstrap(metric, ours, theirs, paired, draws, rng)
    return found


def _bootstrap(
    metric: str,
    baseline: Mapping[str, Sequence[float]],
    other: Mapping[str, Sequence[float]],
    paired: bool,
    draws: int,
    rng: np.random.Generator,
) -> list[Ratio]:
    ours = [np.asarray(values) for values in baseline.values()]
    theirs = [np.asarray(other[c]) for c in baseline] if paired else [
        np.asarray(values) for values in other.values()
    ]  # fmt: skip
    picks = rng.integers(len(ours), size=(draws, len(ours)))
    other_picks = picks if paired else rng.integers(len(theirs), size=(draws, len(theirs)))
    seen, drawn = _statistics(ours), _resampled(ours, picks)
    other_seen, other_drawn = _statistics(theirs), _resampled(theirs, other_picks)
    with np.errstate(divide="ignore", invalid="ignore"):
        quotients = other_drawn / drawn
    found = []
    for column, name in enumerate(STATISTICS):
        base_s, value_s = float(seen[column]), float(other_seen[column])
        finite = quotients[:, column][np.isfinite(quotients[:, column])]
        if base_s > 0 and finite.size:
            low, high = (float(end) for end in np.percentile(finite, _CONFIDENCE))
            kind, count = ("paired" if paired else "unpaired"), min(len(ours), len(theirs))
            ratio = value_s / base_s
            found.append(Ratio(metric, name, base_s, value_s, ratio, low, high, kind, count))
    return found


def _resampled(groups: Sequence[Any], picks: Any) -> Any:
    """Statistics of each draw; shape (draws, statistics)."""
    if all(len(group) == 1 for group in groups):
        return _statistics_of_rows(np.concatenate(groups)[picks])
    return np.stack([_statistics([groups[index] for index in pick]) for pick in picks])


def _statistics(groups: Sequence[Any]) -> Any:
    return _statistics_of_rows(np.concatenate(groups)[np.newaxis])[0]


def _statistics_of_rows(values: Any) -> Any:
    # The geometric mean is of the values above 0 alone, as in `conserve_lab.latencies.Summary`.
    above = values > 0
    logs = np.log(np.where(above, values, 1.0)).sum(axis=1)
    gmeans = np.where(above.any(axis=1), np.exp(logs / np.maximum(above.sum(axis=1), 1)), 0.0)
    return np.column_stack((gmeans, *np.percentile(values, (50, 95), axis=1)))


# --- Reports against each other -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Comparison:
    label: str
    baseline: str
    ratios: list[Ratio]


def compare(reports: Sequence[Report], draws: int = DRAWS) -> list[Comparison]:
    """Compare every run with the first system's at its own rate, or with the first report.

    Systems that one call alternated between are compared round by round, or start by start; two
    other runs of one workload (same name, options and seed) are paired by conversation.
    """
    names = labels(reports)
    found = []
    for index, report in enumerate(reports):
        rivals = [
            i
            for i, other in enumerate(reports)
            if other.system == reports[0].system and other.arrivals == report.arrivals
        ]
        base = rivals[0] if rivals else 0
        if base == index:
            continue
        found.append(Comparison(names[index], names[base], _ratios(reports[base], report, draws)))
    return found


def _ratios(baseline: Report, other: Report, draws: int) -> list[Ratio]:
    paired = baseline.workload == other.workload
    # Equal options mean one call: they include what that call put before conversation ids.
    if paired and baseline.options.get("rounds") and baseline.options == other.options:
        ours, theirs = _by_round(baseline.samples), _by_round(other.samples)
        both = sorted(ours.keys() & theirs.keys())
        found = round_ratios([ours[r] for r in both], [theirs[r] for r in both], draws)
        alternation = baseline.environment.get("alternation") or {}
        return [replace(ratio, kind=alternation.get("unit", "rounds")) for ratio in found]
    return ratios(baseline.samples, other.samples, paired=paired, draws=draws)


def _by_round(pooled: Samples) -> dict[str, Samples]:
    """Samples by round, which `conserve_lab.rounds.pooled` puts before conversation ids."""
    found: dict[str, Samples] = defaultdict(lambda: {metric: {} for metric in LABELS})
    for metric, values in pooled.items():
        for conversation, times_s in values.items():
            found[conversation.partition(ROUND)[0]][metric][conversation] = times_s
    return dict(found)


def labels(reports: Sequence[Report]) -> list[str]:
    """Name each report: its system, with the rate where there are several rates."""
    rates = {report.rate_per_s for report in reports}
    names = [
        report.system if len(rates) == 1 or not report.rate_per_s
        else f"{report.system} at {report.rate_per_s:g}/s"
        for report in reports
    ]  # fmt: skip
    return [
        name if names.count(name) == 1 else f"{name} #{names[: index + 1].count(name)}"
        for index, name in enumerate(names)
    ]


def write_comparisons(comparisons: Sequence[Comparison], path: Path) -> None:
    path.write_bytes(msgspec.json.encode({"comparisons": comparisons}) + b"\n")


def show_comparisons(comparisons: Sequence[Comparison], console: Console) -> None:
    for comparison in comparisons:
        kinds = {ratio.kind for ratio in comparison.ratios}
        unit = min(kinds) if kinds <= {"rounds", "starts"} else "conversations"
        table = Table(
            title=f"{comparison.label} against {comparison.baseline}",
            caption=f"{', '.join(sorted(kinds))}; ratio below 1: {comparison.label} is faster",
            box=box.SIMPLE_HEAD,
        )
        table.add_column("", no_wrap=True)
        table.add_column("", no_wrap=True)
        for heading in (comparison.baseline, comparison.label, "ratio", "95 %", unit):
            table.add_column(heading, justify="right")
        for ratio in comparison.ratios:
            if ratio.metric in _SHOWN and ratio.statistic != "p50":
                table.add_row(
                    LABELS[ratio.metric] if ratio.statistic == STATISTICS[0] else "",
                    ratio.statistic,
                    seconds(ratio.baseline_s),
                    seconds(ratio.value_s),
                    _coloured(ratio),
                    f"{ratio.low:.2f}-{ratio.high:.2f}",
                    f"{ratio.count:,}",
                )
        console.print(table)


def _coloured(ratio: Ratio) -> str:
    # Only where the interval leaves no doubt about the direction.
    colour = "green" if ratio.high < 1 else "red" if ratio.low > 1 else "default"
    return f"[{colour}]{ratio.ratio:.2f}[/]"


# --- Rounds of one call ---------------------------------------------------------------------------


def round_ratios(
    baseline: Sequence[Samples], other: Sequence[Samples], draws: int = DRAWS, seed: int = 0
) -> list[Ratio]:
    """Medians over rounds of each round's ratio; the bootstrap draws rounds."""
    found = []
    for metric in LABELS:
        of_rounds = [
            (_statistics(_arrays(ours[metric])), _statistics(_arrays(theirs[metric])))
            for ours, theirs in zip(baseline, other, strict=True)
            if ours[metric] and theirs[metric]
        ]
        for column, name in enumerate(STATISTICS):
            values = [(float(a[column]), float(b[column])) for a, b in of_rounds if a[column] > 0]
            if values:
                found.append(_median_ratio(metric, name, values, draws, seed))
    return found


def _arrays(values: Mapping[str, Sequence[float]]) -> list[Any]:
    return [np.asarray(group) for group in values.values()]


def _median_ratio(
    metric: str, statistic: str, values: Sequence[tuple[float, float]], draws: int, seed: int
) -> Ratio:
    quotients = np.asarray([theirs / ours for ours, theirs in values])
    picks = np.random.default_rng(seed).integers(len(values), size=(draws, len(values)))
    low, high = np.percentile(np.median(quotients[picks], axis=1), _CONFIDENCE)
    return Ratio(
        metric,
        statistic,
        baseline_s=statistics.median(ours for ours, _ in values),
        value_s=statistics.median(theirs for _, theirs in values),
        ratio=float(np.median(quotients)),
        low=float(low),
        high=float(high),
        kind="rounds",
        count=len(values),
    )
