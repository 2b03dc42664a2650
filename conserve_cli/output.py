"""Prints for all commands: tables that pipes do not cut, refusals, and ends by signals."""

import contextlib
import signal
from collections.abc import Iterator
from typing import NoReturn

import typer
from rich.console import Console, ConsoleDimensions
from rich.markup import escape

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


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Have a plain ``kill``, or a closed terminal, raise KeyboardInterrupt as Ctrl-C does."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    previous = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
