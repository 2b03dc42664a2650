"""The console of all programs: tables are whole in a pipe or a file, whatever the width."""

from rich.console import Console, ConsoleDimensions

# Of what is no terminal. Tables take no more than they need of it.
_UNBOUNDED = 100_000


class WholeConsole(Console):
    """A console that cuts and folds nothing where its output is no terminal.

    Rich takes 80 columns there, or those of a terminal that happens to be behind another of the
    process's files, and cuts tables down to that. ``COLUMNS`` in the environment still counts.
    """

    @property
    def size(self) -> ConsoleDimensions:
        """The terminal's; or room for whatever is printed."""
        found = super().size
        asked = self._width is not None or self._environ.get("COLUMNS", "").isdigit()
        if asked or self.is_terminal:
            return found
        return ConsoleDimensions(_UNBOUNDED, found.height)

    @size.setter
    def size(self, new_size: tuple[int, int]) -> None:
        self._width, self._height = new_size


def new_console(*, stderr: bool = False, least_width: int = 0) -> Console:
    """A console for everything that a program prints.

    Args:
        stderr: whether it prints there.
        least_width: what its tables need; a narrower terminal wraps their lines.
    """
    console = WholeConsole(stderr=stderr)
    if console.is_terminal and console.width < least_width:
        console.width = least_width
    return console
