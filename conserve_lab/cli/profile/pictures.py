"""Draws a profile's fits: points as measured, curves as fitted."""

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import numpy as np
from matplotlib.figure import Figure

from autoscale.capacity.profile import Profile

Point = dict[str, float]

# Okabe and Ito's colours.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")


def draw_fits(profile: Profile, path: Path) -> None:
    """Write one picture with a panel for each curve; those without points stay empty."""
    figure = Figure(figsize=(10, 7.5), layout="constrained")
    (prefill, decode), (beside, handoff) = figure.subplots(2, 2)
    share = profile.interference.prefill_share

    def cold_or_append_s(point: Point) -> float:
        return profile.prefill.seconds(point["new_tokens"], point["cached_tokens"])

    def step_s(point: Point) -> float:
        return profile.decode.step_s(point["sequences"], point["kv_tokens"])

    def beside_s(point: Point) -> float:
        own_s = profile.prefill.marginal_s(point["new_tokens"], point["cached_tokens"])
        return step_s(point) + share * own_s

    def handoff_s(point: Point) -> float:
        return profile.handoff.seconds(point["tokens"])

    def cached(point: Point) -> str:
        tokens = _near(point["cached_tokens"])
        return f"after {tokens:,} cached" if tokens else "cold"

    points = defaultdict(list, profile.points)
    _panel(prefill, points["prefill"], "new_tokens", cold_or_append_s, cached)
    prefill.set(title="prefill", xlabel="new tokens", yscale="log")
    _panel(decode, points["decode"], "kv_tokens", step_s, "batch {sequences:.0f}".format_map)
    decode.set(title="decode iteration", xlabel="KV tokens of the batch")
    sequences = "beside {sequences:.0f} sequences".format_map
    _panel(beside, points["interference"], "new_tokens", beside_s, sequences)
    beside.set(title="iteration with an append", xlabel="new tokens")
    _panel(handoff, points["handoff"], "tokens", handoff_s, lambda point: "")
    handoff.set(title="handoff", xlabel="tokens handed off")
    figure.suptitle(f"{profile.name}: {profile.model}")
    figure.savefig(path, dpi=120)


def _panel(
    axes: Any,
    points: list[Point],
    x: str,
    fitted_s: Callable[[Point], float],
    name: Callable[[Point], str],
) -> None:
    """Draw each group of points with one name, and the fitted curve through it."""
    groups: dict[str, list[Point]] = {}
    for point in sorted(points, key=_order):
        groups.setdefault(name(point), []).append(point)
    for colour, (label, some) in zip(_COLOURS, groups.items(), strict=False):
        at = [point[x] for point in some]
        axes.plot(at, [point["seconds"] * 1e3 for point in some], "o", color=colour, label=label)
        along = np.geomspace(min(at), max(at), 60)
        axes.plot(along, [fitted_s({**some[0], x: n}) * 1e3 for n in along], color=colour)
    axes.set_xscale("log", base=2)
    axes.set_ylabel("ms")
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=8)


def _order(point: Point) -> tuple[float, float]:
    return point.get("sequences", 0), point.get("cached_tokens", 0)


def _near(tokens: float) -> int:
    """Return the nearest power of two, as only whole blocks of a prefix are cached."""
    return round(2 ** round(float(np.log2(tokens)))) if tokens else 0
