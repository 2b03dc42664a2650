"""Environments of processes: folders on this machine, and commands in a sandbox."""

import contextlib
import logging
import socket
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Protocol

from conserve.environments import Environment, Run
from conserve.environments.spec import MOST_PORTS
from conserve.settings import EnvironmentSettings
from deployments.environments.sandbox import (
    Outcome,
    Place,
    Sandbox,
    SandboxError,
    kill_marked,
    marked,
    remove_tree,
)

logger = logging.getLogger("conserve.environments")

# Below those that Linux gives to outgoing connections (from 32768), as long as there are no more
# environments than by default.
FIRST_PORT = 28_000
# For commands of a manager that was killed to see that it is gone, and to end.
_PREDECESSOR_S = 3.0


class Running(Protocol):
    """A command that runs."""

    def wait(self) -> Outcome:
        """Return when it has ended.

        Raises:
            SandboxError: what became of it is not known.
        """

    def cut(self) -> None:
        """End it."""


class Backend(Protocol):
    """Makes environments of one kind. All of it blocks, and may be called from several threads.

    Attributes:
        isolation: what keeps their commands from the rest, in a word.
    """

    isolation: str

    def prepare(self, one: Environment) -> tuple[int, ...]:
        """Make it, also where half of it is there; returns the ports that it has.

        Raises:
            SandboxError: it cannot be; the message is for its client.
        """

    def start(self, one: Environment, run: Run) -> Running:
        """Start a command in one that is prepared.

        Raises:
            SandboxError: it cannot be.
        """

    def remove(self, one: Environment) -> None:
        """Have nothing left of it, its commands included.

        Raises:
            OSError, SandboxError: something is left; it is tried again.
        """

    def tidy(self, kept: Collection[int]) -> None:
        """After a predecessor: end its commands, and remove all but these environments."""


class Processes:
    """Environments of processes.

    Args:
        root: all environments' folder, which is there.
        namespaces: whether commands have namespaces.
    """

    def __init__(self, root: Path, settings: EnvironmentSettings, *, namespaces: bool) -> None:
        self.isolation = "namespaces" if namespaces else "limits"
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
                logger.warning("removing %s, which is nobody's", folder)
                remove_tree(folder)


def place(root: Path, one: Environment, ports: tuple[int, ...] = ()) -> Place:
    """Return where an environment is."""
    return Place(root, one.number, one.slot, ports)


def folders(root: Path) -> Iterable[Path]:
    """Environments' folders."""
    with contextlib.suppress(FileNotFoundError):
        for path in root.iterdir():
            if path.name.isascii() and path.name.isdecimal():
                yield path


def choose_ports(one: Environment) -> tuple[int, ...]:
    """Ports of an environment's own, on which nobody listens now.

    Raises:
        SandboxError: there are too few.
    """
    own = range(FIRST_PORT + one.slot * MOST_PORTS, FIRST_PORT + (one.slot + 1) * MOST_PORTS)
    free = [port for port in own if _is_free(port)] if one.spec.ports else []
    if len(free) < one.spec.ports:
        raise SandboxError(
            f"of the ports from {own[0]} to {own[-1]} only {len(free)} are free; end "
            "what listens there"
        )
    return tuple(free[: one.spec.ports])


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def require_setup(outcome: Outcome) -> None:
    """Raises:
    SandboxError: an environment's setup has failed.
    """
    if outcome.exit_code or outcome.reason:
        why = outcome.reason or f"its exit code is {outcome.exit_code}"
        said = (outcome.stderr or outcome.stdout)[-500:].strip()
        raise SandboxError(f"setup: {why}" + (f"; it said: {said}" if said else ""))
