"""Routers of one application that differ in one thing, so that this is all that is measured.

Each is a process of its own, before the same conversation table and engines.
"""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import ray
import uvicorn

from conserve.launch import Launch
from conserve.settings import Settings
from deployments.joining import find_ray
from deployments.router.frontdoor import FrontDoor
from deployments.table_client import TableClient
from experiments.harness import Experiment

_START_S = 120.0
_FIRST_PORT = 8191


class Door(NamedTuple):
    """A router: its name in tables, and what its process is started with beside its port."""

    name: str
    arguments: Sequence[str] = ()


class RunningTable(TableClient):
    """The table of the application that runs, whatever its settings have become."""

    def _connect(self) -> Any:
        if self._actor is None:
            found = [
                one["name"]
                for one in ray.util.list_named_actors(all_namespaces=True)
                if one["namespace"] == "serve" and str(one["name"]).startswith("conserve:")
            ]
            name = max(one for one in found if ":table:" in one)
            self._actor = ray.get_actor(name, namespace="serve")
        return self._actor


def serve(port: int, settings: Settings) -> None:
    """Serve as a router of the application that runs, until this process is ended."""
    find_ray("auto")
    ray.init(address="auto", namespace="serve", log_to_driver=False)
    front = FrontDoor(settings, RunningTable("", "", settings), f"door-{port}")
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


@contextlib.contextmanager
def opened(
    experiment: Experiment, doors: Sequence[Door], *settings: str
) -> Iterator[dict[str, str]]:
    """Have the application and the doors up for the time of a ``with`` block; the doors' URLs.

    A door's process runs the experiment, which has a hidden option ``--door PORT``.

    Args:
        settings: of the application.
    """
    urls = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(experiment.serving(*settings))
        for port, door in enumerate(doors, _FIRST_PORT):
            command = [sys.executable, "-m", experiment.module, "--door", str(port)]
            process = Launch([], experiment.log(door.name), None, [*command, *door.arguments])

            def wait(url: str, process: Launch = process) -> None:
                process.wait_until_serving(url, 1, 1, timeout_s=_START_S)

            urls[door.name] = stack.enter_context(experiment.up(process, door.name, wait, port))
        yield urls
