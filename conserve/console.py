"""The console of all programs, which does not cut tables in pipes and files."""

from rich.console import Console, ConsoleDimensions

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
