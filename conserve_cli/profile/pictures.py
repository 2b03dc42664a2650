"""Draws a profile's fits: points as measured, curves as fitted."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import numpy as np
from matplotlib.figure import Figure

from autoscale.capacity.profile import Profile

# Okabe and Ito's colours.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")


def draw_fits(profile: Profile, path: Path) -> None:
    """Write one picture with a panel for each curve; those without points stay empty."""
    figure = Figure(figsize=(10, 7.5), layout="constrained")
    (prefill, decode), (beside, handoff) = figure.subplots(2, 2)
    _prefill(prefill, profile)
    _decode(decode, profile)
    _beside(beside, profile)
    _handoff(handoff, profile)
    figure.suptitle(f"{profile.name}: {profile.model}")
    figure.savefig(path, dpi=120)


def _prefill(axes: Any, profile: Profile) -> None:
    points = profile.points.get("prefill", [])
    cold = [point for point in points if not point["cached_tokens"]]
    axes.plot(*_xy(cold, "new_tokens"), "o", color=_COLOURS[0], label="cold")
    lengths = _lengths(cold, "new_tokens")
    axes.plot(lengths, [profile.prefill.seconds(n) * 1e3 for n in lengths], color=_COLOURS[0])
    for colour, cached in zip(
        _COLOURS[1:], sorted({_near(p["cached_tokens"]) for p in points} - {0}), strict=False
    ):
        some = [point for point in points if _near(point["cached_tokens"]) == cached]
        axes.plot(*_xy(some, "new_tokens"), "s", color=colour, label=f"after {cached:,} cached")
        lengths = _lengths(some, "new_tokens")
        fitted = [profile.prefill.seconds(n, cached) * 1e3 for n in lengths]
        axes.plot(lengths, fitted, color=colour)
    _finish(axes, "prefill", "new tokens")
    axes.set_yscale("log")


def _decode(axes: Any, profile: Profile) -> None:
    points = profile.points.get("decode", [])
    for colour, batch in zip(
        _COLOURS, sorted({int(point["sequences"]) for point in points}), strict=False
    ):
        some = [point for point in points if point["sequences"] == batch]
        axes.plot(*_xy(some, "kv_tokens"), "o", color=colour, label=f"batch {batch}")
        held = _lengths(some, "kv_tokens")
        axes.plot(held, [profile.decode.step_s(batch, k) * 1e3 for k in held], color=colour)
    _finish(axes, "decode iteration", "KV tokens of the batch")


def _beside(axes: Any, profile: Profile) -> None:
    points = profile.points.get("interference", [])
    share = profile.interference.prefill_share
    for colour, batch in zip(
        _COLOURS, sorted({int(point["sequences"]) for point in points}), strict=False
    ):
        some = sorted(
            (point for point in points if point["sequences"] == batch),
            key=lambda point: point["new_tokens"],
        )
        axes.plot(*_xy(some, "new_tokens"), "o", color=colour, label=f"beside {batch} sequences")
        fitted = [
            profile.decode.step_s(batch, point["kv_tokens"])
            + share * profile.prefill.marginal_s(point["new_tokens"], point["cached_tokens"])
            for point in some
        ]
        axes.plot([point["new_tokens"] for point in some], np.array(fitted) * 1e3, color=colour)
    _finish(axes, "iteration with an append", "new tokens")


def _handoff(axes: Any, profile: Profile) -> None:
    points = profile.points.get("handoff", [])
    axes.plot(*_xy(points, "tokens"), "o", color=_COLOURS[0])
    lengths = _lengths(points, "tokens")
    axes.plot(lengths, [profile.handoff.seconds(n) * 1e3 for n in lengths], color=_COLOURS[0])
    _finish(axes, "handoff", "tokens handed off")


def _xy(points: list[dict[str, float]], x: str) -> tuple[list[float], list[float]]:
    return [point[x] for point in points], [point["seconds"] * 1e3 for point in points]


def _lengths(points: list[dict[str, float]], x: str) -> Any:
    values = [point[x] for point in points] or [1.0, 2.0]
    return np.geomspace(min(values), max(values), 60)


def _near(tokens: float) -> int:
    """Return the nearest power of two, as only whole blocks of a prefix are cached."""
    return round(2 ** round(float(np.log2(tokens)))) if tokens else 0


def _finish(axes: Any, title: str, x: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set(title=title, xlabel=x, ylabel="ms")
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=8)
