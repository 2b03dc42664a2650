"""Progress, pictures and folders of the lab's commands."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from conserve_cli.output import console, refuse
from conserve_lab.workloads import Workload


def given_options(context: typer.Context) -> Iterator[tuple[str, str]]:
    """Yield the name, and the first spelling, of each option that the command line has."""
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        # The enumeration is Click's or Typer's own, depending on the version, so compare its name.
        if source is not None and source.name == "COMMANDLINE":
            yield name, parameter.opts[0]


def show_notes(workload: Workload) -> None:
    for note in workload.notes:
        console.print(f"[yellow]{escape(note)}.[/yellow]", highlight=False)


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
