"""Routers of one application that differ in one thing, measured in turn.

Each is a process of its own before the same conversation table and engines, so that what differs
between them is all that is measured.
"""

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import uvicorn
from rich.console import Console
from rich.progress import Progress

from conserve.console import new_console
from conserve.launch import Launch
from conserve.settings import Settings
from deployments.loopback import find_on_loopback
from deployments.router.frontdoor import FrontDoor
from deployments.table.table_client import TableClient
from experiments import warm

_APPLICATION = "http://127.0.0.1:8000"
_DOOR_START_S = 120.0


@dataclass(frozen=True, slots=True)
class Door:
    """A router.

    Attributes:
        name: in tables.
        port: on loopback.
        arguments: what its process is started with beside its port.
        headers: what requests to it carry.
    """

    name: str
    port: int
    arguments: Sequence[str] = ()
    headers: Mapping[str, str] | None = None


class RunningTable(TableClient):
    """The table of the application that runs, whatever its settings have become."""

    def _connect(self) -> Any:
        if self._actor is None:
            found = [
                one["name"]
                for one in ray.util.list_named_actors(all_namespaces=True)
                if one["namespace"] == "serve" and str(one["name"]).startswith("conserve:")
            ]
            (name,) = [one for one in found if ":table:" in one]
            self._actor = ray.get_actor(name, namespace="serve")
        return self._actor


def serve(port: int, settings: Settings, make: Callable[..., FrontDoor] = FrontDoor) -> None:
    """Serve as a router of the application that runs, until this process is ended."""
    find_on_loopback("auto")
    ray.init(address="auto", namespace="serve", log_to_driver=False)
    front = make(settings, RunningTable("", settings), f"door-{port}")
    # As `deployments.router.router` has it.
    uvicorn.run(
        front,
        host="127.0.0.1",
        port=port,
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_keep_alive=75,
        server_header=False,
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of every experiment with doors, which it passes on to them."""
    warm.add_options(parser)
    parser.add_argument("--door", type=int, help=argparse.SUPPRESS)


@contextlib.contextmanager
def opened(
    module: str,
    doors: Sequence[Door],
    folder: Path,
    console: Console,
    settings: Sequence[str] = (),
) -> Iterator[dict[str, str]]:
    """Have the application and the doors up for the time of a ``with`` block; the doors' URLs.

    Args:
        module: what a door's process runs, with ``--door PORT``.
        folder: for logs.
        settings: of the application, beside ``decoders=1``.
    """
    application = Launch(["decoders=1", *settings], folder / "conserve.log")
    processes = [_process(module, door, folder) for door in doors]
    urls = {door.name: f"http://127.0.0.1:{door.port}" for door in doors}
    try:
        with console.status(f"starting the application (logs: {folder})"):
            application.__enter__()
            application.wait_until_serving(_APPLICATION, 1, 1)
            for process, url in zip(processes, urls.values(), strict=True):
                process.__enter__()
                process.wait_until_serving(url, 1, 1, timeout_s=_DOOR_START_S)
        yield urls
    finally:
        for process in (*processes, application):
            process.stop()


def compare(module: str, doors: Sequence[Door], folder: Path, options: argparse.Namespace) -> None:
    """Measure warm turns through doors, and print what was found.

    Args:
        module, folder: as for `opened`.
        doors: the first is what ratios are to.
        options: as of `add_options`.
    """
    console = new_console(least_width=130)
    headers = {door.name: door.headers for door in doors if door.headers is not None}
    with opened(module, doors, folder, console) as urls:
        with Progress(console=console) as progress:
            results = warm.measure(
                urls,
                options.rounds,
                warm.loads(options),
                progress,
                options.seed,
                headers,
                warm.size(options),
            )
        warm.report(results, console, doors[0].name)
    if options.json:
        warm.write_json(options.json, options, results, doors[0].name)


def new_folder(name: str) -> Path:
    """A temporary folder for logs."""
    return Path(tempfile.mkdtemp(prefix=f"conserve-{name}-"))


def _process(module: str, door: Door, folder: Path) -> Launch:
    command = [sys.executable, "-m", module, "--door", str(door.port), *door.arguments]
    return Launch([], folder / f"{door.name.replace(' ', '-')}.log", None, command)
