"""Tables and the picture."""

import math
from collections.abc import Iterable, Sequence
from math import inf, nan
from pathlib import Path
from statistics import fmean

import matplotlib

matplotlib.use("Agg")

from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from experiments.elastic.measure import Figures

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


def show(found: Sequence[Figures], console: Console) -> None:
    """Print, for each scene, what came out, and ratios to collocated engines."""
    for scene in dict.fromkeys(one.scene for one in found):
        of_it = [one for one in found if one.scene == scene]
        table = _table(f"{scene}: TTFET p50, p95 in s; last-turn TBT p95 in ms; refused", of_it)
        for engines, system, by_load in _rows(of_it):
            table.add_row(engines, system, *(_absolute(ones) for ones in by_load))
        console.print(table)
        if all(one.system != _BASE for one in of_it):
            table = _table(f"{scene}: TTFET over five times the unloaded one, or refused", of_it)
            for engines, system, by_load in _rows(of_it):
                cells = (f"{fmean(one.over_slo for one in ones):.1%}" for ones in by_load)
                table.add_row(engines, system, *cells)
            console.print(table)
            continue
        table = _table(f"{scene}: TTFET p95 and last-turn TBT p95, over collocated", of_it)
        for engines, system, by_load in _rows(of_it):
            table.add_row(engines, system, *(_relative(ones, of_it) for ones in by_load))
        console.print(table)


def show_against_best(found: Sequence[Figures], console: Console) -> None:
    """Print how far `elastic` is behind the best of the others, or ahead; alone, and as shipped."""
    for system in _OTHERS:
        compared = [one for one in found if one.system == system]
        if not compared:
            continue
        title = f"{system}: TTFET p95 over the best of the others', means over seeds"
        table = _table(title, compared)
        loads = sorted({one.load for one in compared})
        for engines, scene, by_load in _rows(compared, by_scene=True):
            shown = {ones[0].load: _over_best(ones, found) for ones in by_load}
            table.add_row(engines, scene, *(shown.get(load, "") for load in loads))
        console.print(table)


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
    others: dict[str, list[Figures]] = {}
    for other in found:
        if other.system in _OTHERS[ones[0].system] and any(_same(one, other) for one in ones):
            others.setdefault(other.system, []).append(other)
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
    figure = Figure(figsize=(4 * len(layouts), 2.7 * len(scenes)), layout="constrained")
    axes = figure.subplots(len(scenes), len(layouts), sharex=True, sharey=True, squeeze=False)
    for row, scene in enumerate(scenes):
        for column, engines in enumerate(layouts):
            panel = axes[row, column]
            here = [one for one in compared if (one.scene, one.engines) == (scene, engines)]
            for _, system, by_load in _rows(here):
                loads = [ones[0].load for ones in by_load]
                ratios = [_ratios(ones, here) for ones in by_load]
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
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle("TTFET p95 (lines) and last-turn TBT p95 (dots), over collocated engines'")
    figure.savefig(path, dpi=100)


def _over_best(ones: Sequence[Figures], found: Sequence[Figures]) -> str:
    ratio = over_best(ones, found)
    return "refuses" if ratio == inf else f"{ratio:.2f}" if ratio else "alone"


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
    return (one.scene, one.engines, one.load, one.seed) == (
        other.scene, other.engines, other.load, other.seed,
    )  # fmt: skip


def _rows(
    found: Sequence[Figures], by_scene: bool = False
) -> Iterable[tuple[str, str, list[list[Figures]]]]:
    """Engines, system (or scene), and for each load what came out by seed."""
    keys = dict.fromkeys((one.engines, one.scene if by_scene else one.system) for one in found)
    for engines, name in keys:
        by_load: dict[float, list[Figures]] = {}
        for one in found:
            if (one.engines, one.scene if by_scene else one.system) == (engines, name):
                by_load.setdefault(one.load, []).append(one)
        yield engines, name, [by_load[load] for load in sorted(by_load)]


def _table(title: str, found: Sequence[Figures]) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD)
    table.add_column("engines")
    table.add_column("")
    for load in sorted({one.load for one in found}):
        table.add_column(f"{load:g}", justify="right", no_wrap=True)
    return table
