"""``conserve adapters``: LoRA adapters that a running application takes up, or gives up."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from conserve.adapters import Adapter, AdapterError, AdapterFile, adapter_in, read
from conserve.tenants import KeyFileError, keyfile
from conserve_cli.output import console, refuse

cli = typer.Typer(
    help="LoRA adapters of a model. An application with `adapters_file` follows a change within "
    "seconds, and what runs goes on.",
    no_args_is_help=True,
    add_completion=False,
)

File = Annotated[
    Path, typer.Option("--file", envvar="CONSERVE_ADAPTERS_FILE", help="The file of adapters.")
]
Name = Annotated[str, typer.Argument(help="The name under which clients ask for it.")]
_FILE = Path("adapters.json")


@cli.command()
def add(
    name: Name,
    path: Annotated[Path, typer.Argument(help="Its folder, the same on each engine's node.")],
    file: File = _FILE,
) -> None:
    """Add an adapter, or another one under its name, whose turns begin anew."""
    with _changed(file) as known:
        known[name] = adapter_in(name, str(path.expanduser().absolute()))
    console.print(f"Added {name}.")


@cli.command()
def remove(name: Name, file: File = _FILE) -> None:
    """Remove an adapter. Turns that run with it are finished, and new ones are refused."""
    with _changed(file) as known:
        if known.pop(name, None) is None:
            raise AdapterError(f"no adapter is named {name!r}; `conserve adapters list` has them")
    console.print(f"Removed {name}.")


@cli.command(name="list")
def list_(file: File = _FILE) -> None:
    """Show the adapters of the file; those of an application's settings are not among them."""
    table = Table(title=f"Adapters in {escape(str(file))}")
    for column in ("name", "folder", "digest"):
        table.add_column(column, overflow="fold")
    with _refusals():
        for one in read(file).values():
            table.add_row(one.name, escape(one.path), one.digest[:16])
    console.print(table)


@contextlib.contextmanager
def _changed(file: Path) -> Iterator[dict[str, Adapter]]:
    with _refusals(), keyfile.locked(file) as path:
        known = read(path)
        yield known
        keyfile.write(path, AdapterFile(1, list(known.values())))


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except (AdapterError, KeyFileError) as error:
        refuse(str(error), 1)
