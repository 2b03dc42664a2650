"""See the package."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from autoscale.capacity.profile import load_profile
from benchmarks.experiments import scale
from benchmarks.experiments.scale.claims import claims
from benchmarks.experiments.scale.measure import Figures, closed, opened
from benchmarks.experiments.scale.scenes import CLOSED, CONTENDERS, REGIMES, arriving
from benchmarks.experiments.scale.show import draw, show, show_claims, show_latencies
from benchmarks.simulate.run import EngineCounts

_PROFILE = "h100-qwen3-8b"
# As in ConServe's paper; the others have four collocated engines.
_CLOSED_ENGINES = EngineCounts(prefillers=1, decoders=3)
# The smallest that ConServe can do with; MARS's evaluation has one.
_OPEN_ENGINES = EngineCounts(prefillers=1, decoders=1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the experiment; the exit status is 0 whatever comes out."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.experiments.scale",
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
    parser.add_argument(
        "--arriving", type=int, default=300, metavar="N", help="programs a rate (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="figures and the picture go there"
    )
    options = parser.parse_args(arguments)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    console = Console(width=118)
    profile = load_profile(_PROFILE)
    scenes = [one for one in CLOSED if one.shape is not None or options.data is not None]
    counts, rates = map(int, filter(None, options.programs)), list(filter(None, options.rates))
    loops = [(scene, count) for count in counts for scene in scenes]
    arrivals = [(regime, rate) for regime in REGIMES for rate in rates]
    found: list[Figures] = []
    late: list[Figures] = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=len(CONTENDERS) * (len(loops) + len(arrivals)))
        for scene, count in loops:
            workload = scene.workload(options.data, options.seed)
            for one in CONTENDERS:
                progress.update(task, description=f"{scene.name}, {count}: {one.label}")
                found.append(closed(scene, one, count, profile, _CLOSED_ENGINES, workload))
                progress.advance(task)
        for regime, rate in arrivals:
            workload = arriving(REGIMES[regime], rate, options.arriving, options.seed)
            for one in CONTENDERS:
                progress.update(task, description=f"{regime}, {rate:g}/s: {one.label}")
                late.append(opened(regime, one, rate, profile, _OPEN_ENGINES, workload))
                progress.advance(task)
    show(found, console, "")
    show_latencies(late, console)
    show_claims(claims(found + late), console)
    if options.out is not None:
        rows = [asdict(one) for one in found + late]
        (options.out / "scale.json").write_text(json.dumps(rows, indent=2) + "\n")
        if found:
            draw(found, options.out / "scale.png")


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
