"""Tables and the picture."""

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from experiments.scale.claims import Claim
from experiments.scale.measure import Figures

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
}


def show(found: Sequence[Figures], console: Console) -> None:
    """Print a table for each scene: a row for each system, a column for each load."""
    for scene in dict.fromkeys(one.scene for one in found):
        of_it = [one for one in found if one.scene == scene]
        _print(
            scene, of_it, console, "", "output tokens/s, and of what is repeated, what was found",
            lambda one: f"{one.tokens_per_s:,.0f} {one.found:4.0%}",
        )  # fmt: skip
        _print(
            scene, of_it, console, "", "steps/min, and a turn's mean latency",
            lambda one: f"{one.steps_per_min:,.0f} {one.latency_s:5.1f} s",
        )  # fmt: skip
        if any(one.failed for one in of_it):
            _print(scene, of_it, console, "", "turns refused", lambda one: f"{one.failed:,}")


def show_latencies(found: Sequence[Figures], console: Console) -> None:
    """Print programs' mean latency for each regime and rate."""
    for scene in dict.fromkeys(one.scene for one in found):
        _print(
            scene, [one for one in found if one.scene == scene], console, "/s",
            "a program's mean time, its tools' included, and hits",
            lambda one: (
                f"{one.program_s:,.0f} s {one.found:4.0%}" if one.program_s is not None else "-"
            ) + (f", {one.failed} failed" if one.failed else ""),
        )  # fmt: skip


def show_claims(claims: Sequence[Claim], console: Console) -> None:
    """Print what papers claim beside what came out."""
    table = Table(title="What papers claim, and what came out", box=SIMPLE_HEAD)
    for heading in ("source", "what", "published", "simulated", "comes out"):
        table.add_column(heading)
    for one in claims:
        if not one.simulated:
            continue
        published = f"{one.low:.2f} to {one.high:.2f}" if one.low != one.high else f"> {one.low:g}"
        values = sorted(one.simulated.values())
        if len(values) > 3:
            simulated = f"{values[0]:.2f} to {values[-1]:.2f}"
        else:
            simulated = ", ".join(f"{value:.2f} ({name})" for name, value in one.simulated.items())
        table.add_row(one.source, one.what, published, simulated, one.comes_out)
    console.print(table)


def draw(found: Sequence[Figures], path: Path) -> None:
    """Throughput and hits over the number of programs, a line for each system."""
    scenes = list(dict.fromkeys(one.scene for one in found))
    figure = Figure(figsize=(4.6 * len(scenes), 7), layout="constrained")
    axes = figure.subplots(2, len(scenes), sharex=True, squeeze=False)
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
    figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False)
    figure.savefig(path, dpi=110)


def _print(
    scene: str,
    found: Sequence[Figures],
    console: Console,
    unit: str,
    what: str,
    cell: Callable[[Figures], str],
) -> None:
    table = Table(title=f"{scene}: {what}", box=SIMPLE_HEAD)
    table.add_column("system")
    loads = list(dict.fromkeys(one.load for one in found))
    for load in loads:
        table.add_column(f"{load:g}{unit}", justify="right", no_wrap=True)
    for system in dict.fromkeys(one.system for one in found):
        row = {one.load: cell(one) for one in found if one.system == system}
        table.add_row(system, *(row.get(load, "-") for load in loads))
    console.print(table)
