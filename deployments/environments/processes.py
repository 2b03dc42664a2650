"""Runs environments as folders on this machine, with commands in a sandbox."""

import contextlib
import logging
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Protocol

from conserve.environments import Environment, Run
from conserve.environments.spec import MOST_PORTS
from conserve.settings import EnvironmentSettings
from deployments.answers import Isolation
from deployments.environments.sandbox import (
    Outcome,
    Place,
    Sandbox,
    SandboxError,
    kill_marked,
    marked,
    remove_tree,
)
from deployments.node.lmcache_server import is_free

logger = logging.getLogger("conserve.environments")

# Below those that Linux gives to outgoing connections (from 32768), as long as there are no more
# environments than by default.
FIRST_PORT = 28_000
# Time for a killed manager's commands to notice, and to end.
_PREDECESSOR_S = 3.0


class Running(Protocol):
    def wait(self) -> Outcome:
        """Return when it has ended; raises `SandboxError` if its outcome is not known."""

    def cut(self) -> None: ...


class Backend(Protocol):
    """Makes environments of one kind. Calls block, and may come from several threads.

    ``isolation`` names what keeps their commands apart from the rest.
    """

    isolation: Isolation

    def prepare(self, one: Environment) -> tuple[int, ...]:
        """Make an environment, or make a half-made one again; return its ports.

        Raises `SandboxError` with a message for clients.
        """

    def start(self, one: Environment, run: Run) -> Running:
        """Start a command in a prepared environment; raises `SandboxError`."""

    def remove(self, one: Environment) -> None:
        """Remove an environment and end its commands; raises `OSError` or `SandboxError`."""

    def tidy(self, kept: Collection[int]) -> None:
        """End a predecessor's commands, and remove all other environments."""


class Processes:
    """Environments of processes; ``root`` is the folder of all of them."""

    def __init__(self, root: Path, settings: EnvironmentSettings, *, namespaces: bool) -> None:
        self.isolation: Isolation = "namespaces" if namespaces else "limits"
        self._root = root
        self._sandbox = Sandbox(namespaces=namespaces, network=settings.network)

    def prepare(self, one: Environment) -> tuple[int, ...]:
        ports = choose_ports(one)
        try:
            place(self._root, one).make()
        except OSError as error:
            raise SandboxError(f"its folder cannot be made: {error.strerror}") from error
        if one.spec.setup is not None:
            one_with_ports = place(self._root, one, ports)
            setup = Run(command=one.spec.setup)
            require_setup(self._sandbox.start(one_with_ports, setup, one.spec.limits).wait())
        return ports

    def start(self, one: Environment, run: Run) -> Running:
        return self._sandbox.start(place(self._root, one, one.ports), run, one.spec.limits)

    def remove(self, one: Environment) -> None:
        if not self._sandbox.namespaces:
            kill_marked(f"{self._root}:{one.number}")
        place(self._root, one).remove()

    def tidy(self, kept: Collection[int]) -> None:
        deadline_s = time.monotonic() + _PREDECESSOR_S
        while marked(f"{self._root}:") and time.monotonic() < deadline_s:
            time.sleep(0.05)
        if ended := kill_marked(f"{self._root}:", exactly=False):
            logger.warning("ended %d processes of environments' commands", ended)
        for folder in folders(self._root):
            if int(folder.name) not in kept:
                logger.warning("removing %s, which no conversation holds", folder)
                remove_tree(folder)


def place(root: Path, one: Environment, ports: tuple[int, ...] = ()) -> Place:
    return Place(root, one.number, one.slot, ports)


def folders(root: Path) -> Iterable[Path]:
    with contextlib.suppress(FileNotFoundError):
        for path in root.iterdir():
            if path.name.isascii() and path.name.isdecimal():
                yield path


def choose_ports(one: Environment) -> tuple[int, ...]:
    """Return free ports of an environment's range; raises `SandboxError` if too few are free."""
    own = range(FIRST_PORT + one.slot * MOST_PORTS, FIRST_PORT + (one.slot + 1) * MOST_PORTS)
    free = [port for port in own if is_free("127.0.0.1", port)] if one.spec.ports else []
    if len(free) < one.spec.ports:
        raise SandboxError(
            f"of the ports from {own[0]} to {own[-1]} only {len(free)} are free; end "
            "what listens there"
        )
    return tuple(free[: one.spec.ports])


def require_setup(outcome: Outcome) -> None:
    """Raise `SandboxError` if an environment's setup has failed."""
    if outcome.exit_code or outcome.reason:
        why = outcome.reason or f"its exit code is {outcome.exit_code}"
        said = (outcome.stderr or outcome.stdout)[-500:].strip()
        raise SandboxError(f"setup: {why}" + (f"; it said: {said}" if said else ""))
