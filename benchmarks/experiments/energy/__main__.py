"""Compare tiers' tokens per joule on one workload; prints tables, and draws a picture."""

import argparse
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.experiments.energy.model import Machine, ModelledRun, Speed, Step
from benchmarks.experiments.energy.rig import Accounted, Draw, Rig, Tier
from benchmarks.records import Script
from benchmarks.selection import Selection
from conserve.console import new_console
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


def run(
    setup: Setup, selection: Selection, draw: Draw, rig: Rig, progress: Progress
) -> AccountedRun:
    """Serve the workload once."""
    machine = Machine(
        _CAPPED if setup.prefiller else Speed(), _CAPPED if setup.decoders else Speed()
    )
    cap = Cap(fraction=2 / 3)
    tiers = {
        "prefill": Tier("prefiller", (_PREFILLER,), cap if setup.prefiller else None),
        "decode": Tier("decoder", _DECODERS, cap if setup.decoders else None),
    }
    task = progress.add_task(setup.name, total=selection.conversations)

    def steps() -> Iterator[tuple[float, dict[str, Step], dict[str, int]]]:
        arrived = 0

        def plan() -> Iterator[tuple[float, Script]]:
            nonlocal arrived
            for arrival in selection.workload():
                arrived += 1
                yield arrival

        for now_s, did in machine.run(plan(), _STEP_S):
            progress.update(task, completed=arrived)
            yield now_s, did, machine.computed_tokens()

    accounted = rig.account(tiers, draw, steps(), _STEP_S)
    progress.remove_task(task)
    return AccountedRun(setup, machine.outcome, accounted)


def modelled_j(outcome: ModelledRun, draw: Draw, setup: Setup) -> float:
    """Joules that the GPUs use by the model's busy seconds, without a meter."""
    total_j = 0.0
    for name, busy in outcome.busy.items():
        capped = setup.prefiller if name == _PREFILLER else setup.decoders
        limit_w = _LIMIT_W * 2 / 3 if capped else _LIMIT_W
        idle_s = outcome.duration_s - busy.prefill_s - busy.decode_s
        total_j += min(draw.prefill_w, limit_w) * busy.prefill_s
        total_j += min(draw.decode_w, limit_w) * busy.decode_s
        total_j += draw.idle_w * idle_s
    return total_j


def gains(runs: list[AccountedRun], draws: list[Draw]) -> list[tuple[Draw, float]]:
    """How many more tokens a joule the heterogeneous setup gives, for each assumed draw."""
    homogeneous, heterogeneous = runs[0], runs[1]
    found = []
    for draw in draws:
        per_j = [
            run.outcome.tokens / modelled_j(run.outcome, draw, run.setup)
            for run in (homogeneous, heterogeneous)
        ]
        found.append((draw, per_j[1] / per_j[0] - 1))
    return found


def show(runs: list[AccountedRun], draws: list[tuple[Draw, float]], console: Console) -> None:
    """Print the tables."""
    table = Table(title="Stand-in GPUs under a modelled load, metered by the node's keeper")
    table.add_column("")
    for run in runs:
        table.add_column(run.setup.name, justify="right")
    for label, value in _ROWS.items():
        table.add_row(label, *(value(run, runs[0]) for run in runs))
    console.print(table)
    outcome = runs[0].outcome
    console.print(
        f"{len(outcome.turn_s):,} turns, {outcome.tokens:,} tokens of whole prompts and outputs, "
        f"{sum(outcome.computed_tokens.values()):,} computed, {outcome.duration_s:,.0f} s. "
        "Limits after the end: "
        + ", ".join(f"{limit:.0f} W" for run in runs for limit in sorted(run.accounted.after_w))
        + "."
    )
    sweep = Table(
        title=f"Modelled: gain by what an uncapped decode draws (paper: {PAPERS_GAIN:+.2%})"
    )
    for column in ("decode draws, W", "idle, W", "gain"):
        sweep.add_column(column, justify="right")
    for draw, gain in draws:
        sweep.add_row(f"{draw.decode_w:.0f}", f"{draw.idle_w:.0f}", f"{gain:+.2%}")
    console.print(sweep)


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
    "prompt and output tokens/J": lambda run, _: f"{_tokens_per_j(run):.1f}",
    "  gain": lambda run, first: f"{_tokens_per_j(run) / _tokens_per_j(first) - 1:+.2%}",
    "TTFT of turn 1, p95, s": lambda run, _: f"{_p95(run.outcome.ttft1_s):.2f}",
    "turn latency, p95, s": lambda run, _: f"{_p95(run.outcome.turn_s):.2f}",
}


def _tokens_per_j(run: AccountedRun) -> float:
    """Tokens of every turn's whole prompt and of its output, over the joules accounted."""
    return run.outcome.tokens / run.accounted.total_j


def _p95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20)[-1]


def main() -> None:
    """Run each setup on the same workload."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--conversations", type=int, default=400)
    parser.add_argument("--rate", type=float, default=1.5, help="conversations/s")
    parser.add_argument("--data", type=Path, help="folder of recorded sessions, to replay them")
    parser.add_argument("--decode-w", type=float, default=300.0, help="draw of uncapped decode")
    parser.add_argument("--idle-w", type=float, default=30.0)
    parser.add_argument("--picture", type=Path, help="where to draw the sweep")
    options = parser.parse_args()
    selection = Selection("synthetic", options.conversations, rate_per_s=options.rate)
    if options.data is not None:
        # The paper's engines hold 300k tokens, and people answer late.
        selection = replace(
            selection, kind="recorded", data=options.data, max_context_tokens=32_768, max_gap_s=60.0
        )
    draw = Draw(idle_w=options.idle_w, decode_w=options.decode_w)
    console = new_console()
    with tempfile.TemporaryDirectory() as folder, Progress(console=console) as progress:
        rig = Rig(Path(folder))
        runs = [run(setup, selection, draw, rig, progress) for setup in SETUPS]
    draws = [
        replace(draw, decode_w=float(decode_w), idle_w=idle_w)
        for idle_w in (draw.idle_w, 80.0)
        for decode_w in range(200, 301, 20)
    ]
    swept = gains(runs, draws)
    show(runs, swept, console)
    if options.picture is not None:
        from benchmarks.experiments.energy.picture import draw_sweep

        draw_sweep(swept, PAPERS_GAIN, options.picture)
        console.print(f"Picture: {options.picture}")


if __name__ == "__main__":
    main()
