"""``conserve record``: writes what goes through a running application as sessions without text."""

import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import httpx
import typer
from rich.markup import escape

from conserve_cli.output import console, ended_by_signals, refuse
from conserve_cli.running import (
    EVERY_S,
    URL,
    Json,
    Key,
    Tenant,
    Unanswered,
    Url,
    application,
    asked,
)
from conserve_lab.workloads.recordings import RecordingFile

cli = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_LEAST_BYTES = 10_000


@cli.command()
def record(
    file: Annotated[Path, typer.Argument(help="The recording; it must not exist, or be empty.")],
    url: Url = URL,
    key: Key = None,
    tenant: Tenant = None,
    model: Annotated[str | None, typer.Option(help="The model, where there are several.")] = None,
    max_size: Annotated[
        int,
        typer.Option(min=_LEAST_BYTES, help="Most bytes of FILE and FILE.1, the one before, both."),
    ] = 10**9,
    anonymous_tools: Annotated[
        bool, typer.Option("--anonymous-tools", help="Write tool-1, tool-2, ... for tools' names.")
    ] = False,
) -> None:
    """Write a running application's turns to a file, without text, until Ctrl-C.

    With a tenant's key it gets that tenant's turns, with an admin's all.
    """
    if file.exists() and file.stat().st_size:
        refuse(f"{file} exists; name a file that does not")
    try:
        written = RecordingFile(file, max_size, anonymous_tools=anonymous_tools)
        given = {"tenant": tenant, "model": model}
        asks = "".join(f"&{name}={quote(one)}" for name, one in given.items() if one is not None)
        with suppress(KeyboardInterrupt), ended_by_signals(), application(url, key) as client:
            _follow(client, written, asks)
        written.close()
    except OSError as error:
        refuse(f"{file} cannot be written: {error.strerror}. The application is not affected.", 1)
    missed = f"; {written.dropped:,} were not asked for in time" if written.dropped else ""
    console.print(f"{escape(str(file))} has {written.turns:,} turns{missed}.", highlight=False)


def _follow(client: httpx.Client, written: RecordingFile, tenant: str) -> None:
    page: Json = asked(client, "GET", f"/v1/recording?after=0{tenant}")
    console.print(f"Recording {escape(page['model'])} until Ctrl-C.", highlight=False)
    while True:
        written.write(page)
        try:
            page = asked(client, "GET", f"/v1/recording?after={page['newest']}{tenant}")
        except Unanswered as error:
            if error.refused:
                raise
            console.print(f"{escape(str(error))}; trying again.", highlight=False)
            time.sleep(EVERY_S)
            page = page | {"turns": []}
