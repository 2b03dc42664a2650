"""Compares tokens per joule of homogeneous and heterogeneous tiers, on stand-in GPUs.

What is modelled: how long the work takes and what it draws (`model`). What is measured: that caps
are set, hold and are put back, and how many joules are accounted to whom, by the very code that a
node's actor runs, through nvidia-ml-py, on stand-in GPUs (`rig`).
"""

import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.progress import Progress

from conserve_lab.selection import Selection
from experiments.energy.model import Machine, ModelledRun, Speed, Step
from experiments.energy.rig import Accounted, Draw, Rig, Tier
from experiments.harness import Experiment, figure
from hetero.power import Cap

PAPERS_GAIN = 0.2275
_LIMIT_W = 300.0
_STEP_S = 0.05
_PREFILLER = "prefiller-0"
_DECODERS = ("decoder-0", "decoder-1", "decoder-2")
# Under a cap of 2/3, work that is bound by compute takes the third root of 3/2 times as long, if
# dynamic power grows with the cube of the clock. What is bound by memory is as fast as before
# (section 5.5: latencies stay essentially unchanged).
_CAPPED = Speed(prefill=1.5 ** (1 / 3), decode=1.0)


@dataclass(frozen=True, slots=True)
class Setup:
    """Which tiers are capped, at 2/3 of the default limit."""

    name: str
    prefiller: bool
    decoders: bool


SETUPS = (
    Setup("homogeneous: 300 W, 300 W", prefiller=False, decoders=False),
    Setup("heterogeneous: 300 W, 200 W", prefiller=False, decoders=True),
    Setup("all capped: 200 W, 200 W", prefiller=True, decoders=True),
)


@dataclass(slots=True)
class AccountedRun:
    """A setup's modelled run, and the accounting of it."""

    setup: Setup
    outcome: ModelledRun
    accounted: Accounted

    @property
    def tokens_per_j(self) -> float:
        """Tokens of every turn's whole prompt and of its output, over the joules accounted."""
        return self.outcome.tokens / self.accounted.total_j


def run(
    setup: Setup, selection: Selection, draw: Draw, rig: Rig, progress: Progress
) -> AccountedRun:
    machine = Machine(
        _CAPPED if setup.prefiller else Speed(), _CAPPED if setup.decoders else Speed()
    )
    cap = Cap(fraction=2 / 3)
    tiers = {
        "prefill": Tier("prefiller", (_PREFILLER,), cap if setup.prefiller else None),
        "decode": Tier("decoder", _DECODERS, cap if setup.decoders else None),
    }
    arrivals = progress.track(selection.workload(), selection.conversations, description=setup.name)

    def steps() -> Iterator[tuple[float, dict[str, Step], dict[str, int]]]:
        for now_s, did in machine.run(arrivals, _STEP_S):
            yield now_s, did, machine.computed_tokens()

    accounted = rig.account(tiers, draw, steps(), _STEP_S)
    return AccountedRun(setup, machine.outcome, accounted)


def modelled_j(outcome: ModelledRun, draw: Draw, setup: Setup) -> float:
    """Return the joules that the GPUs use by the model's busy seconds, without a meter."""
    total_j = 0.0
    for name, busy in outcome.busy.items():
        capped = setup.prefiller if name == _PREFILLER else setup.decoders
        limit_w = _LIMIT_W * 2 / 3 if capped else _LIMIT_W
        idle_s = outcome.duration_s - busy.prefill_s - busy.decode_s
        total_j += min(draw.prefill_w, limit_w) * busy.prefill_s
        total_j += min(draw.decode_w, limit_w) * busy.decode_s
        total_j += draw.idle_w * idle_s
    return total_j


def gains(runs: Sequence[AccountedRun], draws: Sequence[Draw]) -> list[tuple[Draw, float]]:
    """Return how many more tokens a joule the heterogeneous setup gives, for each assumed draw."""
    found = []
    for draw in draws:
        homogeneous, heterogeneous = (
            run.outcome.tokens / modelled_j(run.outcome, draw, run.setup) for run in runs[:2]
        )
        found.append((draw, heterogeneous / homogeneous - 1))
    return found


_ROWS: dict[str, Callable[[AccountedRun, AccountedRun], str]] = {
    "limits that held, W": lambda run, _: ", ".join(
        f"{limit_w:.0f}" for limit_w in run.accounted.limits_w.values()
    ),
    "energy, kJ": lambda run, _: f"{run.accounted.total_j / 1e3:,.1f}",
    "  accounted of what was used": lambda run, _: (
        f"{run.accounted.total_j / run.accounted.true_j:.2%}"
    ),
    "  cold prefill, kJ": lambda run, _: f"{run.accounted.role_j['prefiller'] / 1e3:,.1f}",
    "  tail, kJ": lambda run, _: f"{run.accounted.role_j['decoder'] / 1e3:,.1f}",
    "tokens computed/J": lambda run, _: f"{run.accounted.tokens_per_j:.2f}",
    "  on the prefill tier": lambda run, _: f"{run.accounted.tier_tokens_per_j['prefill']:.2f}",
    "  on the decode tier": lambda run, _: f"{run.accounted.tier_tokens_per_j['decode']:.2f}",
    "prompt and output tokens/J": lambda run, _: f"{run.tokens_per_j:.1f}",
    "  gain": lambda run, first: f"{run.tokens_per_j / first.tokens_per_j - 1:+.2%}",
    "TTFT of turn 1, p95, s": lambda run, _: f"{_p95(run.outcome.ttft1_s):.2f}",
    "turn latency, p95, s": lambda run, _: f"{_p95(run.outcome.turn_s):.2f}",
}


def _p95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20)[-1]


def show(
    runs: Sequence[AccountedRun], swept: Sequence[tuple[Draw, float]], experiment: Experiment
) -> None:
    title = "Stand-in GPUs under a modelled load, metered by the node's keeper"
    rows = [(label, *(cell(run, runs[0]) for run in runs)) for label, cell in _ROWS.items()]
    experiment.show(title, ["", *(run.setup.name for run in runs)], rows, wrap=True)
    outcome = runs[0].outcome
    limits = [f"{limit:.0f} W" for run in runs for limit in sorted(run.accounted.after_w)]
    experiment.console.print(
        f"{len(outcome.turn_s):,} turns, {outcome.tokens:,} tokens of whole prompts and outputs, "
        f"{sum(outcome.computed_tokens.values()):,} computed, {outcome.duration_s:,.0f} s. "
        f"Limits after the end: {', '.join(limits)}."
    )
    title = f"Modelled: gain by what an uncapped decode draws (paper: {PAPERS_GAIN:+.2%})"
    rows = [(f"{one.decode_w:.0f}", f"{one.idle_w:.0f}", f"{gain:+.2%}") for one, gain in swept]
    experiment.show(title, ("decode draws, W", "idle, W", "gain"), rows, names=0)


def draw_sweep(swept: Sequence[tuple[Draw, float]], path: Path) -> None:
    """Draw the gain over what decode draws: a line for each idle power, and the paper's figure."""
    from matplotlib.ticker import PercentFormatter

    picture = figure(6.4, 4.0)
    axes = picture.add_subplot()
    idles_w = sorted({draw.idle_w for draw, _ in swept})
    for idle_w, colour, marker in zip(idles_w, ("#0072B2", "#D55E00"), "os", strict=False):
        points = [(draw.decode_w, gain) for draw, gain in swept if draw.idle_w == idle_w]
        label = f"idle {idle_w:.0f} W"
        axes.plot(*zip(*points, strict=True), color=colour, marker=marker, label=label)
    axes.axhline(PAPERS_GAIN, color="#000000", linestyle=(0, (5, 2)), linewidth=1.2)
    note = f"the paper: {PAPERS_GAIN:+.2%}"
    axes.annotate(note, (200, PAPERS_GAIN), (0, 4), textcoords="offset points")
    axes.set_xlabel("power of decode without a cap (W, assumed)")
    axes.set_ylabel("tokens per joule, capped against uncapped")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_title("Decoders capped at 200 W of 300 W: modelled gain")
    axes.grid(visible=True, color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right")
    picture.savefig(path, dpi=150)


def main(arguments: Sequence[str] | None = None) -> None:
    experiment = Experiment("energy", __doc__, data=True)
    experiment.option("--conversations", 400)
    experiment.option("--rate", 1.5, "conversations/s")
    experiment.option("--decode-w", 300.0, "draw of uncapped decode")
    experiment.option("--idle-w", 30.0)
    options = experiment.parse(arguments)
    selection = Selection("synthetic", options.conversations, rate_per_s=options.rate)
    if options.data is not None:
        # The paper's engines hold 300k tokens, and people answer late.
        selection = replace(
            selection, kind="recorded", data=options.data, max_context_tokens=32_768, max_gap_s=60.0
        )
    draw = Draw(idle_w=options.idle_w, decode_w=options.decode_w)
    with (
        tempfile.TemporaryDirectory() as folder,
        Progress(console=experiment.console, transient=True) as progress,
    ):
        rig = Rig(Path(folder))
        runs = [run(setup, selection, draw, rig, progress) for setup in SETUPS]
    draws = [
        replace(draw, decode_w=float(decode_w), idle_w=idle_w)
        for idle_w in (draw.idle_w, 80.0)
        for decode_w in range(200, 301, 20)
    ]
    swept = gains(runs, draws)
    show(runs, swept, experiment)
    experiment.save({"gains": swept})
    if path := experiment.file("png"):
        draw_sweep(swept, path)
        experiment.console.print(f"Picture: {path}")


if __name__ == "__main__":
    main()
