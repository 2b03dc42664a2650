"""The harness of all experiments: options, systems, rounds, statistics, tables and results.

An experiment is a module with a `main` that makes an `Experiment`, adds its own options, measures,
shows tables and saves what it found. Everything that is measured with several systems is measured
in rounds of random order: a machine's noise is larger than most differences, and hits all systems
of a round alike.
"""

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

from rich.markup import escape
from rich.progress import track
from rich.table import Table

from conserve.launch import Launch
from conserve_cli.output import new_console

_Case = TypeVar("_Case")
_Found = TypeVar("_Found")
_Key = TypeVar("_Key")
_BOOTSTRAP_DRAWS = 2000
_PORT = 8000


class Experiment:
    """One experiment's command line, and what it does with its results.

    Args:
        name: its module's, within this package; files of ``--out`` are called so.
        doc: the module's docstring, for ``--help``.
        width: columns that its tables need.
        rounds, seed: defaults of the options; None: it has no such option.
        data, cores: whether it has these options.

    Attributes:
        options: what was given, once it is parsed.
    """

    def __init__(
        self,
        name: str,
        doc: str | None,
        *,
        width: int = 100,
        rounds: int | None = None,
        seed: int | None = None,
        data: bool = False,
        cores: bool = False,
    ) -> None:
        self.name = name
        self.module = f"experiments.{name}"
        self.console = new_console(least_width=width)
        self.options = argparse.Namespace(out=None)
        self.parser = argparse.ArgumentParser(
            prog=f"python -m {self.module}",
            description=doc,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if rounds is not None:
            self.option("--rounds", rounds, "in random order", type=at_least_1)
        if seed is not None:
            self.option("--seed", seed, "of everything that is drawn at random")
        if data:
            self.option("--data", None, "folder of recorded sessions, as for `conserve bench`",
                        type=Path, metavar="FOLDER")  # fmt: skip
        if cores:
            self.option("--cores", None, "cores to pin engines to, one each", type=numbers,
                        metavar="0,1")  # fmt: skip
        self.option("--out", None, "folder for figures and pictures", type=Path, metavar="FOLDER")

    def option(self, flag: str, default: Any, about: str = "", **more: Any) -> None:
        """Add an option of its default's type; where that is a list, it takes several values."""
        shown = str(default)
        if isinstance(default, list):
            more = {"nargs": "+", "type": type(default[0])} | more
            shown = " ".join(map(str, default))
        elif default is not None:
            more = {"type": type(default)} | more
        about = f"{about} (default: {shown})".strip() if default not in (None, "") else about
        self.parser.add_argument(flag, default=default, help=about, **more)

    def hidden(self, flag: str, **more: Any) -> None:
        """Add an option with which an experiment starts itself as another process."""
        self.parser.add_argument(flag, help=argparse.SUPPRESS, **more)

    def parse(self, arguments: Sequence[str] | None = None) -> argparse.Namespace:
        """Read the options; a wrong one ends the program."""
        self.options = self.parser.parse_args(arguments)
        if getattr(self.options, "cores", None):
            from conserve_lab.peers.pinning import autogroup_warning

            if problem := autogroup_warning():
                self.console.print(f"[yellow]{problem}[/yellow]", highlight=False)
        return self.options

    def fail(self, error: Exception, status: int) -> NoReturn:
        """End the program, with one line that says why."""
        self.console.print(f"[red]{escape(str(error))}[/red]", highlight=False)
        raise SystemExit(status)

    # --- Systems ----------------------------------------------------------------------------------

    @cached_property
    def logs(self) -> Path:
        """A temporary folder for logs and what systems are started with."""
        return Path(tempfile.mkdtemp(prefix=f"conserve-{self.name.replace('_', '-')}-"))

    @contextlib.contextmanager
    def serving(
        self, *settings: str, prefillers: int = 1, port: int = _PORT, name: str = "ConServe"
    ) -> Iterator[str]:
        """Have ConServe up with one decoder for the time of a ``with`` block.

        Yields:
            Its URL.
        """
        counts = (f"prefillers={prefillers}", "decoders=1")
        launch = Launch([*counts, f"port={port}", *settings], self.log(name))

        def wait(url: str) -> None:
            launch.wait_until_serving(url, prefillers, 1)

        with self.up(launch, name, wait, port) as url:
            yield url

    @contextlib.contextmanager
    def up(
        self, launch: Launch, name: str, wait: Callable[[str], object], port: int
    ) -> Iterator[str]:
        """Have any system up; ``wait`` returns once it answers at the URL that it is given."""
        url = f"http://127.0.0.1:{port}"
        with launch:
            with self.console.status(f"starting {name} (logs: {self.logs})"):
                wait(url)
            yield url

    def log(self, name: str) -> Path:
        """Return the file for a system's output."""
        return self.logs / f"{name.replace(' ', '-')}.log"

    # --- Measuring --------------------------------------------------------------------------------

    def track(self, cases: Collection[_Case], about: str = "measuring") -> Iterable[_Case]:
        """Yield the cases, and show how many are done."""
        return track(cases, about, len(cases), console=self.console, transient=True)

    def in_own_process(
        self, *arguments: object, environment: Mapping[str, str] | None = None
    ) -> Any:
        """Run this experiment once more, with other arguments; returns what `answer` measures."""
        done = subprocess.run(
            [sys.executable, "-m", self.module, *map(str, arguments)],
            check=True, stdout=subprocess.PIPE, timeout=3600,
            env={**os.environ, **(environment or {})},
        )  # fmt: skip
        return json.loads(done.stdout)

    def on_all_cores(
        self, measure: Callable[[_Case], _Found], cases: Sequence[_Case]
    ) -> list[_Found]:
        """Measure as many cases at a time as there are cores; results in the order of cases."""
        with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            found = pool.map(measure, cases)
            shown = track(found, "simulating", len(cases), console=self.console, transient=True)
            return list(shown)

    # --- Results ----------------------------------------------------------------------------------

    def show(
        self,
        title: str,
        columns: Sequence[str],
        rows: Iterable[Sequence[str]],
        *,
        names: int = 1,
        wrap: bool = False,
        **more: Any,
    ) -> None:
        """Print a table.

        Args:
            rows: cells; an empty row draws a line.
            names: how many columns, from the left, hold names; the others are right-aligned.
            wrap: whether long cells are wrapped where the console is narrow.
            more: what `rich.table.Table` takes.
        """
        table = Table(title=title, **more)
        for number, heading in enumerate(columns):
            side: Literal["left", "right"] = "left" if number < names else "right"
            table.add_column(heading, justify=side, no_wrap=not wrap)
        for row in rows:
            table.add_row(*row) if row else table.add_section()
        self.console.print(table)

    def file(self, ending: str) -> Path | None:
        """Return a file for results, in a folder that is made; None without ``--out``."""
        folder: Path | None = self.options.out
        if folder is None:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{self.name}.{ending}"

    def save(self, found: Any) -> None:
        """Write what was found, dataclasses among it, as JSON; nothing without ``--out``."""
        if path := self.file("json"):
            path.write_text(json.dumps(found, default=asdict, indent=1) + "\n")


def answer(measure: Callable[[], Any]) -> None:
    """Measure on one core, and print what `Experiment.in_own_process` returns where it started."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    print(json.dumps(measure(), default=asdict))


def rounds(names: Iterable[str], count: int, seed: int, warm_up: int = 0) -> list[tuple[int, str]]:
    """Return each round's names in a random order, with the round's number.

    Args:
        warm_up: rounds before the others; their numbers are below 0, and they do not count.
    """
    known, order = list(names), random.Random(seed)
    return [
        (number, name)
        for number in range(-warm_up, count)
        for name in order.sample(known, len(known))
    ]


def group(found: Iterable[_Found], key: Callable[[_Found], _Key]) -> dict[_Key, list[_Found]]:
    """Return what was found by a key, in the order of the keys' first appearance."""
    by: dict[_Key, list[_Found]] = {}
    for one in found:
        by.setdefault(key(one), []).append(one)
    return by


def pivot(
    found: Sequence[_Found],
    row: Callable[[_Found], tuple[str, ...]],
    column: Callable[[_Found], str | float],
    cell: Callable[[list[_Found]], str],
) -> tuple[list[str], list[list[str]]]:
    """Return headings and rows of a table of what was found; numbers in headings rise."""
    columns: list[Any] = list(group(found, column))
    if not any(isinstance(one, str) for one in columns):
        columns.sort()
    rows = []
    for names, ones in group(found, row).items():
        by = group(ones, column)
        rows.append([*names, *(cell(by[one]) if one in by else "" for one in columns)])
    return [one if isinstance(one, str) else f"{one:g}" for one in columns], rows


def figure(width: float, height: float) -> Any:
    """Return an empty picture of matplotlib's, in inches."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


# --- Types of options -----------------------------------------------------------------------------


def numbers(text: str) -> tuple[float, ...]:
    """Read numbers from 0, with commas between."""
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = (-1.0,)
    if min(found) < 0:
        raise argparse.ArgumentTypeError(f"{text!r}: give numbers from 0, with commas between")
    return found


def at_least_1(text: str) -> int:
    """Read a whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number, at least 1")
    return int(text)


# --- Statistics -----------------------------------------------------------------------------------


def percentile(values: Iterable[float], q: float) -> float:
    """Return the q-th quantile, by the nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, and the ends of its 95 % interval (bootstrap over the values)."""
    draw = random.Random(0)
    medians = sorted(
        statistics.median(draw.choices(values, k=len(values))) for _ in range(_BOOTSTRAP_DRAWS)
    )
    return statistics.median(values), percentile(medians, 0.025), percentile(medians, 0.975)


def paired_ratio(system: Sequence[float], base: Sequence[float]) -> tuple[float, float, float]:
    """Return the median ratio of one system to another in the same rounds, and its interval."""
    return median_interval([mine / theirs for mine, theirs in zip(system, base, strict=True)])


def ratio_cells(system: Sequence[float], base: Sequence[float], digits: int = 2) -> list[str]:
    """Return a table's cells for `paired_ratio`; the base itself has no interval."""
    ratio, low, high = paired_ratio(system, base)
    interval = "" if system is base else f"{low:.{digits}f}-{high:.{digits}f}"
    return [f"{ratio:.{digits}f}", interval]


def ratio_quartiles(system: Sequence[float], base: Sequence[float]) -> str:
    """Return the median ratio of one system to another in the same rounds, and its quartiles."""
    ratios = [mine / theirs for mine, theirs in zip(system, base, strict=True)]
    shown = f"{statistics.median(ratios):.2f}"
    if len(ratios) > 1:
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
        shown += f", {low:.2f}-{high:.2f}"
    return shown
