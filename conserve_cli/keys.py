"""``conserve keys``: who may use an application, and how much of it."""

import contextlib
import datetime
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.markup import escape
from rich.table import Table

from conserve.tenants import KeyFile, KeyFileError, Limits, Tenant, keyfile
from conserve_cli.output import console, new_console, refuse

cli = typer.Typer(
    help="API keys, their tenants, and tenants' limits. An application with `keys_file` follows a "
    "change within seconds.",
    no_args_is_help=True,
    add_completion=False,
)
# For everything but results, so that KEY=$(conserve keys add NAME) has only the key.
aside = new_console(stderr=True)

File = Annotated[
    Path, typer.Option("--file", envvar="CONSERVE_KEYS_FILE", help="The file of all keys.")
]
_FILE = Path("keys.json")
_NONE = "none"


@cli.command()
def add(
    tenant: Annotated[str, typer.Argument(help="The key's tenant, which is created if it is new.")],
    admin: Annotated[
        bool, typer.Option("--admin", help="It may see and end all tenants' conversations.")
    ] = False,
    background: Annotated[
        bool, typer.Option("--background", help="Its turns wait for those of other keys.")
    ] = False,
    model: Annotated[
        list[str] | None, typer.Option(help="A model that it is for, of several; or all.")
    ] = None,
    file: File = _FILE,
) -> None:
    """Create a key, and print it, only now; the file is created if it is missing."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    with _refusals(), keyfile.locked(file) as path:
        content = keyfile.read(path) if path.exists() else KeyFile.new()
        content, key = content.with_key(
            tenant, today, admin=admin, background=background, models=tuple(model or ())
        )
        keyfile.write(path, content)
    console.out(key, highlight=False)
    aside.print(
        f"That is a key of tenant {tenant!r}. Keep it: {escape(str(path))} has only its digest.",
        highlight=False,
    )


@cli.command(name="list")
def list_(file: File = _FILE) -> None:
    """Show keys and tenants; keys themselves are not kept."""
    content = _read(file)
    keys = Table(title=f"Keys in {escape(str(file))}")
    limited = any(key.models for key in content.keys)
    for column in ("id", "tenant", "created", "admin", "background", *["models"] * limited):
        keys.add_column(column, no_wrap=True)
    for key in content.keys:
        marks = ["yes" if one else "" for one in (key.admin, key.background)]
        marks += [", ".join(key.models) or "all"] * limited
        keys.add_row(key.id, key.tenant, key.created, *marks)
    console.print(keys)
    console.print(_tenants(content))


@cli.command()
def revoke(
    key_id: Annotated[str, typer.Argument(help="The id in `conserve keys list`.")],
    file: File = _FILE,
) -> None:
    """Revoke a key. Its tenant stays, with its limits."""
    _change(file, lambda content: content.without_key(key_id))
    console.print("Revoked.")


@cli.command()
def limits(
    tenant: Annotated[str, typer.Argument(help="The tenant.")],
    turns: Annotated[
        str | None, typer.Option(help="Turns at a time, waiting ones included; or none.")
    ] = None,
    held_tokens: Annotated[
        str | None, typer.Option(help="Tokens of KV held for its conversations; or none.")
    ] = None,
    conversations: Annotated[str | None, typer.Option(help="Live conversations; or none.")] = None,
    new_per_minute: Annotated[
        str | None, typer.Option(help="Conversations begun within a minute; or none.")
    ] = None,
    shares_cache: Annotated[
        bool | None,
        typer.Option(
            "--share-cache/--own-cache",
            help="Whether it shares prefixes' KV with the other tenants that do: faster where "
            "prompts begin alike, and each can tell by its latency what the others send.",
        ),
    ] = None,
    weight: Annotated[
        int | None,
        typer.Option(min=1, max=1000, help="Its share of service, next to others that wait."),
    ] = None,
    background: Annotated[
        bool | None,
        typer.Option(
            "--background/--interactive", help="Whether its turns wait for other tenants'."
        ),
    ] = None,
    file: File = _FILE,
) -> None:
    """Change what a tenant may have at a time, and show it. What is not given stays."""
    given = {
        "turns": turns,
        "held_tokens": held_tokens,
        "conversations": conversations,
        "new_per_minute": new_per_minute,
    }
    changed = {name: _number(name, text) for name, text in given.items() if text is not None}

    others = {"shares_cache": shares_cache, "weight": weight, "background": background}
    others = {name: value for name, value in others.items() if value is not None}

    def change(content: KeyFile) -> KeyFile:
        old = content.tenants.get(tenant, Tenant())
        limits = msgspec.structs.replace(old.limits, **changed)
        return content.with_tenant(tenant, msgspec.structs.replace(old, limits=limits, **others))

    nothing = not changed and not others
    content = _read(file) if nothing else _change(file, change)
    if tenant not in content.tenants:
        refuse(f"there is no tenant {tenant!r}; `conserve keys add {tenant}` makes one", 1)
    console.print(_tenants(content, tenant))


def _tenants(content: KeyFile, only: str | None = None) -> Table:
    table = Table(title="Tenants")
    table.add_column("tenant", no_wrap=True)
    for name in Limits.__struct_fields__:
        table.add_column(name.replace("_", " "), justify="right")
    for name in ("prefix cache", "weight", "turns are"):
        table.add_column(name, no_wrap=True)
    for name, tenant in sorted(content.tenants.items()):
        if only in (None, name):
            values = [getattr(tenant.limits, field) for field in Limits.__struct_fields__]
            cells = [_NONE if value is None else f"{value:,}" for value in values]
            cells += ["shared" if tenant.shares_cache else "own", str(tenant.weight)]
            table.add_row(name, *cells, "background" if tenant.background else "interactive")
    return table


def _number(name: str, text: str) -> int | None:
    if text == _NONE:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 12):
        option = "--" + name.replace("_", "-")
        refuse(f"{option} takes a number, or {_NONE}, not {text[:40]!r}")
    return int(text)


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except KeyFileError as error:
        refuse(str(error), 1)


def _read(file: Path) -> KeyFile:
    with _refusals():
        return keyfile.read(file)


def _change(file: Path, change: Callable[[KeyFile], KeyFile]) -> KeyFile:
    with _refusals(), keyfile.locked(file) as path:
        content = change(keyfile.read(path))
        keyfile.write(path, content)
    return content
