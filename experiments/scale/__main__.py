"""See the package."""

import argparse
import json
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from benchmarks.simulate.run import EngineCounts
from conserve.console import new_console
from experiments import scale
from experiments.scale.claims import claims
from experiments.scale.measure import Figures, Run, measure
from experiments.scale.scenes import CLOSED, CONTENDERS, REGIMES
from experiments.scale.show import draw, show, show_claims, show_latencies

# As in ConServe's paper; the others have four collocated engines.
_CLOSED_ENGINES = EngineCounts(prefillers=1, decoders=3)
# The smallest that ConServe can do with; MARS's evaluation has one.
_OPEN_ENGINES = EngineCounts(prefillers=1, decoders=1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the experiment; the exit status is 0 whatever comes out."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.scale",
        description=scale.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--data", type=Path, metavar="FOLDER",
        help="recorded sessions, as for `conserve bench` (default: that scene is left out)",
    )  # fmt: skip
    parser.add_argument(
        "--programs", type=_numbers, default=(24.0, 48.0, 96.0, 120.0, 144.0), metavar="N,...",
        help="how many at a time; none with 0 (default: 24,48,96,120,144)",
    )  # fmt: skip
    parser.add_argument(
        "--rates", type=_numbers, default=(0.2, 0.33, 0.5, 1.0), metavar="RATE,...",
        help="of MARS's regimes, programs a second; none with 0 (default: 0.2,0.33,0.5,1)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="figures and the picture go there"
    )
    options = parser.parse_args(arguments)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    console = new_console(least_width=118)
    scenes = [one for one in CLOSED if one.shape is not None or options.data is not None]
    cases = [
        (scene, load, _CLOSED_ENGINES) for scene in scenes for load in options.programs if load
    ] + [(regime, rate, _OPEN_ENGINES) for regime in REGIMES for rate in options.rates if rate]
    runs = [
        Run(scene, one, load, engines, options.data, options.seed)
        for scene, load, engines in cases
        for one in CONTENDERS
    ]
    found = _measure_all(runs, console)
    closed = [one for one in found if not one.scene.startswith("ILR")]
    show(closed, console)
    show_latencies([one for one in found if one.scene.startswith("ILR")], console)
    show_claims(claims(found), console)
    if options.out is not None:
        rows = [asdict(one) for one in found]
        (options.out / "scale.json").write_text(json.dumps(rows, indent=2) + "\n")
        if closed:
            draw(closed, options.out / "scale.png")


def _measure_all(runs: Sequence[Run], console: Console) -> list[Figures]:
    """As many at a time as there are cores; their figures, in the order of the runs."""
    with (
        ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool,
        Progress(console=console, transient=True) as progress,
    ):
        task = progress.add_task("", total=len(runs))
        found = []
        for run, figures in zip(runs, pool.map(measure, runs), strict=True):
            found.append(figures)
            progress.update(task, advance=1, description=run.about)
        return found


def _numbers(text: str) -> tuple[float, ...]:
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        numbers = (-1.0,)
    if min(numbers) < 0:
        raise argparse.ArgumentTypeError(f"{text!r}: give numbers from 0, with commas between")
    return numbers


if __name__ == "__main__":
    main()
