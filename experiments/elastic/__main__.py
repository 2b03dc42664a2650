"""See the package."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from conserve.console import new_console
from experiments import elastic
from experiments.elastic.measure import Cell, Figures, measure
from experiments.elastic.scenes import ENGINES, SCENES
from experiments.elastic.show import draw, show, show_against_best


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the experiment; the exit status is 0 whatever comes out."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.elastic",
        description=elastic.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--data", type=Path, metavar="FOLDER",
        help="recorded sessions, as for `conserve bench` (default: their scenes are left out)",
    )  # fmt: skip
    parser.add_argument(
        "--seeds", type=_numbers, default=(0.0, 1.0), metavar="N,...", help="(default: 0,1)"
    )
    parser.add_argument(
        "--engines", default=",".join(ENGINES), metavar="P:D,...",
        help="prefillers to decoders (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--loads", type=_numbers, metavar="SHARE,...",
        help="shares of saturation, of those that the scenes have (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--scenes", metavar="TEXT", default="", help="only those with this in their names"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="figures and the picture go there"
    )
    options = parser.parse_args(arguments)
    console = new_console(least_width=140)
    path = None
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / "elastic.jsonl"
    cells = [
        Cell(scene, engines, load, int(seed))
        for seed in options.seeds
        for scene in SCENES
        if options.scenes in scene.name and (options.data is not None or not scene.recorded)
        for engines in scene.engines
        if engines in options.engines.split(",")
        for load in scene.loads
        if not options.loads or load in options.loads
    ]
    found = _measure_all(cells, options.data, path, console)
    show(found, console)
    show_against_best(found, console)
    if options.out is not None:
        draw(found, options.out / "elastic.png")


def _measure_all(
    cells: Sequence[Cell], data: Path | None, path: Path | None, console: Console
) -> list[Figures]:
    """Simulate what the file does not have yet, and add it there; all of these cells' figures."""
    known = [] if path is None or not path.exists() else path.read_text().splitlines()
    by = {_key(one): one for one in (Figures(**json.loads(line)) for line in known)}
    found = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=len(cells))
        for cell in cells:
            progress.update(task, description=cell.about)
            scene = cell.scene
            keys = [
                (scene.name, cell.engines, cell.load, cell.seed, name) for name in scene.systems
            ]
            missing = [key[-1] for key in keys if key not in by]
            for one in measure(cell, missing, data) if missing else ():
                by[_key(one)] = one
                if path is not None:
                    with path.open("a") as file:
                        file.write(json.dumps(asdict(one)) + "\n")
            found += [by[key] for key in keys]
            progress.advance(task)
    return found


def _key(one: Figures) -> tuple[str, str, float, int, str]:
    return one.scene, one.engines, one.load, one.seed, one.system


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
