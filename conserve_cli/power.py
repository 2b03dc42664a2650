"""``conserve power``: shows, sets and restores power limits by hand."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.markup import escape
from rich.table import Table

from conserve_cli.output import console, ended_by_signals, refuse
from hetero.nvml import Nvml, NvmlError
from hetero.power import (
    Cap,
    CapRefused,
    PowerCaps,
    Record,
    Restored,
    default_directory,
    has_live_owner,
    records,
    recover,
)

cli = typer.Typer(
    help="Power limits of this machine's GPUs.", no_args_is_help=True, add_completion=False
)

_LOOK_S = 5.0
# An application that does not answer for this long counts as ended.
_SILENT_S = 60.0

Folder = Annotated[
    Path | None,
    typer.Option("--records", help="Folder with the records of caps, if not the default."),
]
Url = Annotated[str, typer.Option(help="The ConServe application whose GPUs may be capped.")]


@cli.command()
def status(records_in: Folder = None) -> None:
    """Show each GPU's draw, limit and bounds, and the caps on record."""
    folder = records_in or default_directory()
    with _nvml() as nvml:
        table = Table(title="Power of this machine's GPUs, watts")
        for column in ("GPU", "name", "draw", "limit", "default", "allowed", "cap"):
            table.add_column(column, justify="right" if column in _NUMBERS else "left")
        on_record = {record.uuid: record for record in _or_exit(records, folder)}
        for gpu in nvml.inventory():
            try:
                has = nvml.power(gpu.uuid)
                numbers = [f"{value:.0f}" for value in (has.draw_w, has.limit_w, has.default_w)]
                numbers.append(f"{has.min_w:.0f}-{has.max_w:.0f}")
            except NvmlError as error:
                numbers = ["?", "?", "?", str(error)]
            record = on_record.pop(gpu.uuid, None)
            state = "none" if record is None else _described(record, folder)
            table.add_row(str(gpu.index), gpu.name, *numbers, state)
        for index in nvml.lost():
            table.add_row(str(index), "does not answer", *[""] * 4, "")
        console.print(table)
        for record in on_record.values():
            console.print(f"[yellow]{record.uuid} is not here: {_described(record, folder)}")


_NUMBERS = ("draw", "limit", "default", "allowed")


def _described(record: Record, folder: Path) -> str:
    if has_live_owner(record.uuid, folder):
        return f"{record.caps_w[-1]:g}, of {record.owner} (process {record.pid})"
    return f"{record.caps_w[-1]:g}, left behind: conserve power restore"


@cli.command()
def apply(
    gpus: Annotated[list[str], typer.Argument(help="Indices or UUIDs, as in the status.")],
    watts: Annotated[float | None, typer.Option(help="The limit, in watts.")] = None,
    fraction: Annotated[
        float | None, typer.Option(help="The limit, as a fraction of the GPU's default.")
    ] = None,
    url: Url = "http://127.0.0.1:8000",
    records_in: Folder = None,
) -> None:
    """Cap GPUs that the application uses, for as long as this command runs (Ctrl-C ends it)."""
    try:
        cap = Cap(watts, fraction)
    except ValueError as error:
        refuse(str(error))
    with ended_by_signals(), _nvml() as nvml:
        uuids = [_uuid(nvml, gpu) for gpu in gpus]
        used = _or_exit(_used, url)
        with PowerCaps(nvml, "conserve power apply", records_in) as caps:
            # Check all GPUs before changing the first one.
            for uuid in uuids:
                _or_exit(caps.check, uuid, cap, used)
            try:
                for uuid in uuids:
                    limit_w = _or_exit(caps.apply, uuid, cap, used)
                    console.print(f"{uuid}: limited to {limit_w:g} W until this command ends.")
                _hold(caps, url)
            except KeyboardInterrupt:
                console.print("Ending.")
            _report(caps.restore_all())


def _hold(caps: PowerCaps, url: str) -> None:
    """Keep the caps until the application no longer uses the GPUs."""
    answered_s = time.monotonic()
    while caps.held:
        time.sleep(_LOOK_S)
        try:
            used = _used(url)
            answered_s = time.monotonic()
        except _NoApplication as error:
            if time.monotonic() - answered_s < _SILENT_S:
                continue
            console.print(f"[yellow]{escape(str(error))}[/yellow]")
            return
        _report([caps.restore(uuid) for uuid in caps.held if uuid not in used])


@cli.command()
def restore(records_in: Folder = None) -> None:
    """Restore limits that dead processes have not put back."""
    with _nvml() as nvml:
        done = recover(nvml, records_in)
    if not done:
        console.print("No cap is on record: nothing to restore.")
    _report(done)
    if any(one.outcome == "failed" for one in done):
        raise typer.Exit(1)


def _report(done: list[Restored]) -> None:
    colours = {"restored": "green", "changed": "yellow", "held": "yellow", "failed": "red"}
    for one in done:
        colour = colours[one.outcome]
        console.print(f"{one.uuid}: [{colour}]{one.outcome}[/{colour}]: {escape(one.detail)}")


class _NoApplication(RuntimeError):
    """No application answers, so its GPUs are not known."""


def _used(url: str) -> set[str]:
    """Return the UUIDs of GPUs that engines of this application use, on any node."""
    try:
        answer = httpx.get(url.rstrip("/") + "/v1/engines", timeout=10).raise_for_status()
        engines = answer.json()["data"]
        return {uuid for engine in engines for uuid in engine["gpus"]}
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise _NoApplication(
            f"no ConServe application answers at {url} ({error}), so no GPU is known to be "
            "used by one; give its --url"
        ) from None


def _uuid(nvml: Nvml, gpu: str) -> str:
    known = {str(one.index): one.uuid for one in nvml.inventory()}
    return known.get(gpu, gpu)


@contextlib.contextmanager
def _nvml() -> Iterator[Nvml]:
    try:
        nvml = Nvml()
    except NvmlError as error:
        refuse(str(error), 1)
    with nvml:
        yield nvml


def _or_exit(function: Any, *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except (CapRefused, NvmlError, OSError, _NoApplication) as error:
        refuse(str(error), 1)
