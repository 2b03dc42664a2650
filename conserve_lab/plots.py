"""Pictures of runs: distributions, and what becomes of them as the rate grows. PNG and SVG."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

from conserve_lab.compare import Comparison
from conserve_lab.latencies import LABELS, TURN_METRICS
from conserve_lab.report import Report

# Okabe and Ito's colours, which colour-blind people can tell apart, less the yellow, which is too
# pale for a line on white. Lines differ in dash and marker as well.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1)), (0, (6, 1.5, 1.5, 1.5)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_DISTRIBUTIONS = ("ttft", "tbt", "ttfet", "e2e_less_gaps")
_AGAINST_RATE = ("ttft", "ttfet", "last_tbt", "e2e_less_gaps")
_COMPARED = ("ttfet_less_gaps", "ttft_later", "last_tbt", "e2e_less_gaps")
_VIOLATED = ("ttfet_less_gaps", "last_tbt", "e2e_less_gaps")
_MOST_TICKS = 8
_WIDE = 100  # A log axis pays where the largest value is this many times the smallest.


def draw_all(reports: Sequence[Report], labels: Sequence[str], folder: Path) -> list[Path]:
    """Draw every picture that the reports have something for; returns the files.

    Distributions of runs at different rates are pictures of their own. Labels are all different.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    rates = sorted({report.rate_per_s or 0.0 for report in reports})
    for rate in rates:
        here = [
            (label, report)
            for label, report in zip(labels, reports, strict=True)
            if (report.rate_per_s or 0.0) == rate
        ]
        ending, title = ("", "") if len(rates) == 1 else (f"-at-{rate:g}", f", {rate:g} arrivals/s")
        for metric in _DISTRIBUTIONS:
            curves = {
                label: [value for values in report.samples[metric].values() for value in values]
                for label, report in here
                if report.samples.get(metric)
            }
            if curves:
                failed = {label: failures(report, metric) for label, report in here}
                figure = distribution(curves, LABELS[metric], title, failed)
                written += save(figure, folder, f"cdf-{metric}{ending}")
    if len(rates) > 1:
        written += _draw_against_rate(reports, folder)
    return written


def _draw_against_rate(reports: Sequence[Report], folder: Path) -> list[Path]:
    written = []
    for metric in _AGAINST_RATE:
        panels = {
            name: _by_system(reports, _latency(metric, statistic))
            for name, statistic in (("geometric mean", "gmean"), ("p95", "p95"))
        }
        if any(panels.values()):
            figure = against_rate(panels, LABELS[metric], f"{LABELS[metric]} (s)")
            written += save(figure, folder, f"rate-{metric}")
    violated = {LABELS[metric]: _by_system(reports, _violations(metric)) for metric in _VIOLATED}
    violated = {label: lines for label, lines in violated.items() if lines}
    if violated:
        figure = against_rate(violated, "SLO violations", "over the SLO", share=True)
        written += save(figure, folder, "rate-slo-violations")
    return written


def draw_ratios(comparisons: Sequence[Comparison], folder: Path, ending: str = "") -> list[Path]:
    """Draw what `of_ratios` does; returns the files, none where there is nothing to compare."""
    figure = of_ratios(comparisons)
    return [] if figure is None else save(figure, folder, f"ratios{ending}")


def of_ratios(comparisons: Sequence[Comparison]) -> Figure | None:
    """Draw each run's p95 latencies over its baseline's, with their intervals, if there are any."""
    found = {
        (one.label, ratio.metric): ratio
        for one in comparisons
        for ratio in one.ratios
        if ratio.statistic == "p95" and ratio.metric in _COMPARED
    }
    metrics = [metric for metric in _COMPARED if any(key[1] == metric for key in found)]
    if not metrics:
        return None
    labels = [one.label for one in comparisons]
    size = (1.6 + 2.6 * len(metrics), 1.4 + 0.4 * len(labels))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(1, len(metrics), squeeze=False)[0]
    for axes, metric in zip(panels, metrics, strict=True):
        axes.axvline(1.0, color="#555555", linewidth=1.0)
        for index, label in enumerate(labels):
            if (ratio := found.get((label, metric))) is not None:
                axes.plot([ratio.low, ratio.high], [index, index], color=_COLOURS[0], linewidth=1.8)
                axes.plot(ratio.ratio, index, color=_COLOURS[0], marker="o")
        axes.set_yticks(range(len(labels)), labels if metric == metrics[0] else [""] * len(labels))
        axes.set_ylim(len(labels) - 0.5, -0.5)
        axes.set_title(LABELS[metric])
        quiet(axes)
    baselines = {one.baseline for one in comparisons}
    whose = min(baselines) if len(baselines) == 1 else "its baseline"
    kinds = " and ".join(sorted({ratio.kind for ratio in found.values()}))
    figure.suptitle(f"p95 over {whose}'s, {kinds}: ratio and 95 % interval")
    return figure


Lines = dict[str, list[tuple[float, float]]]
"""For each system, points: a rate in conversations/s, and a value."""


def _by_system(reports: Sequence[Report], value_of: Callable[[Report], float | None]) -> Lines:
    lines: Lines = defaultdict(list)
    for report in reports:
        value = value_of(report)
        if value is not None and report.rate_per_s is not None:
            lines[report.system].append((report.rate_per_s, value))
    return {system: sorted(points) for system, points in lines.items()}


def _latency(metric: str, statistic: str) -> Callable[[Report], float | None]:
    def value(report: Report) -> float | None:
        summary = report.result.latencies.get(metric)
        return None if summary is None else float(getattr(summary, statistic))

    return value


def _violations(metric: str) -> Callable[[Report], float | None]:
    return lambda report: report.result.violations.get(metric)


def failures(report: Report, metric: str) -> int:
    """How many turns or conversations failed, whichever of them the metric is about."""
    result = report.result
    if metric in TURN_METRICS:
        return result.turns.get("failed", 0) + result.turns.get("timeout", 0)
    return result.conversations.get("failed", 0)


def distribution(
    curves: Mapping[str, Sequence[float]],
    name: str,
    title: str = "",
    failed: Mapping[str, int] | None = None,
) -> Figure:
    """Draw each system's cumulative distribution of seconds.

    ``failed`` says how many of each system's never ended; its curve ends below 100 % by as much.
    """
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.add_subplot()
    positive = [value for values in curves.values() for value in values if value > 0]
    wide = bool(positive) and max(positive) > _WIDE * min(positive)
    for index, (label, values) in enumerate(curves.items()):
        ordered = np.sort(np.asarray(values, dtype=float))
        lost = (failed or {}).get(label, 0)
        share = np.arange(1, ordered.size + 1) / (ordered.size + lost)
        axes.plot(
            # Curves begin at zero, so that the first step is seen.
            np.concatenate(([ordered[0]], ordered)),
            np.concatenate(([0.0], share)),
            drawstyle="steps-post",
            label=f"{label} (n = {ordered.size:,}{f', {lost:,} failed' if lost else ''})",
            **style(index, marker=False),
        )
    if wide:
        axes.set_xscale("log")
    _name_seconds(axes.xaxis)
    axes.set_xlabel(f"{name} (s{', log scale' if wide else ''})")
    axes.set_ylabel("cumulative share")
    axes.set_ylim(0, 1.01)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_title(f"{name}{title}: cumulative distribution")
    axes.legend(loc="lower right", frameon=True)
    quiet(axes)
    return figure


def against_rate(panels: dict[str, Lines], title: str, ylabel: str, share: bool = False) -> Figure:
    """Draw panels side by side, each with a line for each system over the rate of arrivals.

    With ``share``, values are shares of 1, drawn as percentages; else they are seconds.
    """
    figure = Figure(figsize=(1.2 + 4.0 * len(panels), 4.0), layout="constrained")
    systems = list(dict.fromkeys(system for lines in panels.values() for system in lines))
    all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (name, lines) in zip(all_axes, panels.items(), strict=True):
        values = [value for points in lines.values() for _, value in points]
        wide = not share and min(values) > 0 and max(values) > 10 * min(values)
        for system, points in lines.items():
            look = style(systems.index(system), marker=True)
            axes.plot(*zip(*points, strict=True), label=system, clip_on=False, **look)
        axes.set_title(name)
        rates = sorted({rate for points in lines.values() for rate, _ in points})
        axes.set_xticks(rates if len(rates) <= _MOST_TICKS else rates[:: len(rates) // 4])
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_xlabel("arrivals (conversations/s)")
        axes.set_ylabel(ylabel + (", log scale" if wide else ""))
        if share:
            axes.set_ylim(0, 1)
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        elif wide:
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        if not share:
            _name_seconds(axes.yaxis)
        quiet(axes)
    figure.suptitle(title)
    # The legend is that of all panels: a system need not have something in each.
    handles = {
        label: handle
        for axes in all_axes
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=min(4, len(handles)))
    return figure


def style(index: int, marker: bool) -> dict[str, Any]:
    """Return how the line of the system at ``index`` looks, the same in every picture."""
    return {
        "color": _COLOURS[index % len(_COLOURS)],
        "linestyle": _DASHES[index % len(_DASHES)],
        "linewidth": 1.8,
        "marker": _MARKERS[index % len(_MARKERS)] if marker else "",
    }


def _name_seconds(axis: Any) -> None:
    # 0.01 rather than 10 to the minus 2.
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def quiet(axes: Any) -> None:
    axes.grid(visible=True, which="major", color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write a picture as PNG and SVG; returns the files."""
    paths = [folder / f"{name.replace('_', '-')}{ending}" for ending in (".png", ".svg")]
    for path in paths:
        # No date in the file: equal figures are equal files.
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, dpi=150, metadata=metadata)
    return paths
