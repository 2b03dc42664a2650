"""Prints for all commands: tables that pipes do not cut, refusals, progress."""

import contextlib
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich.console import Console, ConsoleDimensions
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

# Width of what is no terminal. Tables take only what they need.
_UNBOUNDED = 100_000


class WholeConsole(Console):
    """A console that cuts and folds nothing if its output is no terminal.

    Rich would take 80 columns, or those of a terminal at another of the process's files.
    ``COLUMNS`` in the environment still counts.
    """

    @property
    def size(self) -> ConsoleDimensions:
        found = super().size
        asked = self._width is not None or self._environ.get("COLUMNS", "").isdigit()
        if asked or self.is_terminal:
            return found
        return ConsoleDimensions(_UNBOUNDED, found.height)

    @size.setter
    def size(self, new_size: tuple[int, int]) -> None:
        self._width, self._height = new_size


def new_console(*, stderr: bool = False, least_width: int = 0) -> Console:
    """Return a console for all output of a program.

    Args:
        least_width: what its tables need; a narrower terminal wraps their lines.
    """
    console = WholeConsole(stderr=stderr)
    if console.is_terminal and console.width < least_width:
        console.width = least_width
    return console


console = new_console()
_errors = new_console(stderr=True)


def refuse(problem: str, status: int = 2) -> NoReturn:
    """Print a problem in red to the standard error, and end the command with this status."""
    _errors.print(f"[red]{escape(problem)}[/red]", highlight=False, soft_wrap=True)
    raise typer.Exit(status) from None


def given_options(context: typer.Context) -> Iterator[tuple[str, str]]:
    """Yield the name, and the first spelling, of each option that the command line has."""
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        # The enumeration is Click's or Typer's own, depending on the version, so compare its name.
        if source is not None and source.name == "COMMANDLINE":
            yield name, parameter.opts[0]


def progress_bar(*fields: str) -> Progress:
    """Return a bar of a task's description, its count and its time, and these fields."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        *(TextColumn(f"{{task.fields[{name}]}}") for name in fields),
        console=console,
        transient=True,
    )


def make_folder(folder: Path) -> None:
    """Make the folder that `--out` names, or end the command."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse(f"--out {folder} cannot be made: {error.strerror}")


def can_draw() -> bool:
    """Return whether matplotlib, an extra of the distribution, is installed; print if it is not."""
    found = find_spec("matplotlib") is not None
    if not found:
        console.print("No pictures: matplotlib is not installed (pip install matplotlib).")
    return found


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Have a plain ``kill``, or a closed terminal, raise KeyboardInterrupt as Ctrl-C does."""

    def interrupt(number: int, frame: Any) -> NoReturn:
        raise KeyboardInterrupt

    numbers = (signal.SIGTERM, signal.SIGHUP)
    previous = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
