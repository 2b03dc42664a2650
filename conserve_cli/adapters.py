"""``conserve adapters``: LoRA adapters that a running application takes up, or gives up."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

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


@cli.command()
def remove(name: Name, file: File = _FILE) -> None:
    """Remove an adapter. Turns that run with it are finished, and new ones are refused."""
    with _changed(file) as known:
        if known.pop(name, None) is None:
            raise AdapterError(
                f"no adapter is named {name!r}; there are {', '.join(known) or 'none'}"
            )


@contextlib.contextmanager
def _changed(file: Path) -> Iterator[dict[str, Adapter]]:
    """Yield the file's adapters, write what becomes of them, and say it."""
    try:
        with keyfile.locked(file) as path:
            known = read(path)
            yield known
            keyfile.write(path, AdapterFile(1, list(known.values())))
    except (AdapterError, KeyFileError) as error:
        refuse(str(error), 1)
    console.print(f"{file} has {', '.join(known) or 'no adapters'} now.", highlight=False)
