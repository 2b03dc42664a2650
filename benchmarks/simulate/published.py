"""Shows published and simulated figures side by side: a table, a file, and pictures."""

from pathlib import Path

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from autoscale.capacity.profile import Profile
from benchmarks.compare import labels
from benchmarks.latencies import LABELS
from benchmarks.simulate.reproduce import (
    E2E,
    JUDGED,
    TTFET,
    Reproduction,
    Row,
    Unit,
    tokens_per_j,
)


def show(found: Reproduction, profile: Profile, console: Console) -> None:
    table = Table(
        title=f"ConServe's figures, simulated on profile {profile.name}",
        caption="latencies over those of conversations that run alone, gaps not counted",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("fig.")
    table.add_column("")
    for heading in ("published", "simulated", "difference"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in found.rows:
        relation = "" if row.relation == "=" else f"{row.relation} "
        if row.within is None:
            last = _said(row.difference, row.unit, signed=True)
        else:
            last = "[green]as said[/]" if row.within else "[red]not so[/]"
        table.add_row(
            row.figure,
            row.what,
            relation + _said(row.published, row.unit),
            _said(row.simulated, row.unit),
            last,
        )
    console.print(table)


def _said(value: float, unit: Unit, *, signed: bool = False) -> str:
    if unit in ("change", "share"):
        if signed:
            return f"{value * 100:+.1f} pp"
        return f"{value:+.1%}" if unit == "change" else f"{value:.1%}"
    return f"{value:{'+' if signed else ''}.2f}" + ("x" if unit == "times" else "")


def write(found: Reproduction, path: Path) -> None:
    rows = [
        {**msgspec.to_builtins(row), "difference": row.difference, "within": row.within}
        for row in found.rows
    ]
    path.write_bytes(msgspec.json.encode({"rows": rows}) + b"\n")


def draw(found: Reproduction, folder: Path) -> list[Path]:
    """Draw published beside simulated, figure 10's latencies over rates, and figure 12's curves.

    Returns the files written.
    """
    from benchmarks.plots import draw_all

    folder.mkdir(parents=True, exist_ok=True)
    reports = list(found.by_rate.values())
    written = draw_all(reports, labels(reports), folder)
    return written + _draw_rows(found.rows, folder) + _draw_wrong(found, folder)


_PANELS: dict[Unit, str] = {
    "times": "times the unloaded latency (or another system's)",
    "change": "change",
    "share": "share of conversations",
}


def _draw_rows(rows: list[Row], folder: Path) -> list[Path]:
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, PercentFormatter

    from benchmarks.plots import quiet, save

    panels = {unit: [row for row in rows if row.unit == unit] for unit in _PANELS}
    figure = Figure(figsize=(9.5, 0.34 * len(rows) + 2.2), layout="constrained")
    heights = [len(some) + 1 for some in panels.values()]
    all_axes = figure.subplots(len(panels), 1, height_ratios=heights)
    for axes, (unit, some) in zip(all_axes, panels.items(), strict=True):
        places = range(len(some))
        for place, row in zip(places, some, strict=True):
            axes.plot((row.published, row.simulated), (place, place), color="#bbbbbb", zorder=1)
        for bound, marker, label in ((False, "o", "published"), (True, ">", "published: a bound")):
            kind = [place for place in places if (some[place].relation != "=") == bound]
            axes.scatter(
                [some[place].published for place in kind], kind, marker=marker, facecolors="none",
                edgecolors="#000000", s=50, label=label, zorder=2,
            )  # fmt: skip
        axes.scatter(
            [row.simulated for row in some], places, color="#0072B2", s=28, marker="D",
            label="simulated", zorder=3,
        )  # fmt: skip
        axes.set_yticks(places, [f"{row.what}  ({row.figure})" for row in some], fontsize=8)
        axes.invert_yaxis()
        axes.margins(y=0.08)
        axes.set_xlabel(_PANELS[unit])
        if unit == "times":
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        else:
            axes.xaxis.set_major_formatter(PercentFormatter(1.0))
        quiet(axes)
    all_axes[0].legend(loc="lower right", fontsize=8)
    figure.suptitle("Published and simulated (in brackets: the paper's figure)")
    return save(figure, folder, "published-and-simulated")


def _draw_wrong(found: Reproduction, folder: Path) -> list[Path]:
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    from benchmarks.plots import quiet, save, style

    wrong = list(found.by_wrong)
    reports = list(found.by_wrong.values())
    alone_s = found.baseline.unloaded.baseline_s
    figure = Figure(figsize=(12.5, 4.0), layout="constrained")
    latency, violated, energy = figure.subplots(1, 3)
    for index, metric in enumerate(JUDGED):
        for statistic, marker in (("gmean", True), ("p95", False)):
            values = [
                getattr(report.result.latencies[metric], statistic) / alone_s[metric]
                for report in reports
            ]
            name = f"{LABELS[metric]}, {statistic}"
            latency.plot(wrong, values, label=name, **style(index, marker=marker))
    for index, metric in enumerate((TTFET, E2E)):
        values = [report.result.violations[metric] for report in reports]
        violated.plot(wrong, values, label=LABELS[metric], **style(index, marker=True))
    violated.plot(
        (0.05, 0.05), (0.078, 0.063), linestyle="", marker="o", markerfacecolor="none",
        markeredgecolor="#000000", label="published, 5 % wrong",
    )  # fmt: skip
    efficiency = [tokens_per_j(report) for report in reports]
    energy.plot(wrong, efficiency, **style(0, marker=True))
    latency.set_ylabel("times the unloaded latency")
    latency.set_ylim(bottom=0)
    violated.set_ylabel("over 5 times the unloaded latency")
    violated.set_ylim(-0.02, 1)
    violated.yaxis.set_major_formatter(PercentFormatter(1.0))
    energy.set_ylabel("tokens/J")
    energy.set_ylim(0, 1.1 * max(efficiency))
    for axes in (latency, violated):
        axes.legend(fontsize=8)
    for axes in (latency, violated, energy):
        axes.set_xlabel("wrong decisions")
        axes.xaxis.set_major_formatter(PercentFormatter(1.0))
        quiet(axes)
    figure.suptitle("Per-turn decisions, some of them wrong, at the prefiller's saturation")
    return save(figure, folder, "wrong-decisions")
