"""The gain in tokens per joule over what an uncapped decode is taken to draw."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from experiments.energy.rig import Draw


def draw_sweep(gains: Sequence[tuple[Draw, float]], published: float, path: Path) -> None:
    """Draw a line for each idle power, and the paper's figure."""
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    for idle_w, colour, marker in zip(
        sorted({draw.idle_w for draw, _ in gains}), ("#0072B2", "#D55E00"), "os", strict=False
    ):
        points = [(draw.decode_w, gain) for draw, gain in gains if draw.idle_w == idle_w]
        axes.plot(
            *zip(*points, strict=True), color=colour, marker=marker, label=f"idle {idle_w:.0f} W"
        )
    axes.axhline(published, color="#000000", linestyle=(0, (5, 2)), linewidth=1.2)
    axes.annotate(
        f"the paper: {published:+.2%}", (200, published), (0, 4), textcoords="offset points"
    )
    axes.set_xlabel("power of decode without a cap (W, assumed)")
    axes.set_ylabel("tokens per joule, capped against uncapped")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_title("Decoders capped at 200 W of 300 W: modelled gain")
    axes.grid(visible=True, color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150)
