"""Runs environments as folders with commands in a sandbox, or as containers.

Containers are run through a program with Docker's command line.
"""

import contextlib
import hashlib
import logging
import os
import shutil
import subprocess
import time
from collections.abc import Collection
from pathlib import Path
from typing import NoReturn

from conserve.settings import EnvironmentSettings
from conserve_tools import launcher
from conserve_tools.answers import CommandDone, Isolation
from conserve_tools.ledger import Environment
from conserve_tools.root import folders
from conserve_tools.sandbox import (
    Command,
    Place,
    Sandbox,
    SandboxError,
    kill_marked,
    marked,
    read_outputs,
    remove_tree,
)
from conserve_tools.spec import MOST_PORTS, Run
from deployments.node.lmcache_server import is_free

logger = logging.getLogger("conserve.environments")

_ANSWER_S = 20.0
# Downloading an image may take long.
_PULL_S = 600.0
_LABEL = "conserve.environments"
# Exit code of ``docker exec`` if it could not run the command.
_NOT_ASKED = 125

# Below those that Linux gives to outgoing connections (from 32768), as long as there are no more
# environments than by default.
FIRST_PORT = 28_000
# Time for a killed manager's commands to notice, and to end.
_PREDECESSOR_S = 3.0


class Processes:
    """Environments of processes; ``root`` is the folder of all of them.

    As with `Containers`, calls block, and may come from several threads. ``isolation`` names what
    keeps commands apart from the rest.
    """

    def __init__(self, root: Path, settings: EnvironmentSettings, *, namespaces: bool) -> None:
        self._root = root
        self._sandbox = Sandbox(namespaces=namespaces, network=settings.network)
        self.isolation = self._sandbox.isolation

    def prepare(self, one: Environment) -> tuple[int, ...]:
        """Make an environment, or make a half-made one again; return its ports.

        Raises `SandboxError` with a message for clients.
        """
        ports = choose_ports(one)
        place(self._root, one).make()
        if one.spec.setup is not None:
            one_with_ports = place(self._root, one, ports)
            setup = Run(command=one.spec.setup)
            require_setup(self._sandbox.start(one_with_ports, setup, one.spec.limits).wait())
        return ports

    def start(self, one: Environment, run: Run) -> Command:
        """Start a command in a prepared environment; raises `SandboxError`."""
        return self._sandbox.start(place(self._root, one, one.ports), run, one.spec.limits)

    def remove(self, one: Environment) -> None:
        """Remove an environment and end its commands; raises `OSError` or `SandboxError`."""
        if not self._sandbox.namespaces:
            kill_marked(f"{self._root}:{one.number}")
        place(self._root, one).remove()

    def tidy(self, kept: Collection[int]) -> None:
        """End a predecessor's commands, and remove all other environments."""
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


def require_setup(outcome: CommandDone) -> None:
    """Raise `SandboxError` if an environment's setup has failed."""
    if outcome.exit_code or outcome.reason:
        why = outcome.reason or f"its exit code is {outcome.exit_code}"
        said = (outcome.stderr or outcome.stdout)[-500:].strip()
        raise SandboxError(f"setup: {why}" + (f"; it said: {said}" if said else ""))


class Containers:
    """Environments that are containers: one process that waits, and commands beside it.

    Memory, processes and a command's time are limited. The home is a folder of this machine, below
    ``root``. ``engine`` is the program that runs them.
    """

    isolation: Isolation = "container"

    def __init__(self, engine: str, root: Path, settings: EnvironmentSettings) -> None:
        self._engine = engine
        self._root = root
        self._settings = settings
        self._label = hashlib.sha256(str(root).encode()).hexdigest()[:12]

    def name(self, one: Environment) -> str:
        return f"conserve-{self._label}-{one.number}"

    def prepare(self, one: Environment) -> tuple[int, ...]:
        assert one.spec.image is not None
        ports = choose_ports(one)
        where = place(self._root, one)
        self._remove_containers([self.name(one)])
        where.make()
        user = where.uid or os.getuid()
        limits = one.spec.limits
        network = ["--network", "bridge" if self._settings.network else "none"]
        if self._settings.network:
            network += [word for port in ports for word in ("-p", f"127.0.0.1:{port}:{port}")]
        ask(
            self._engine, "run", "--detach", "--init", "--name", self.name(one),
            "--label", f"{_LABEL}={self._label}",
            "--user", f"{user}:{user}", "--cap-drop", "ALL",
            "--security-opt", "no-new-privileges",
            "--memory", str(limits.memory_bytes), "--pids-limit", str(limits.processes + 2),
            *network,
            "--volume", f"{where.folder}/home:/home", "--workdir", "/home",
            "--env", "HOME=/home", "--env", f"PORTS={' '.join(map(str, ports))}",
            "--env", f"PORT={ports[0] if ports else ''}",
            one.spec.image, "sleep", "infinity",
            timeout_s=_PULL_S,
        )  # fmt: skip
        if one.spec.setup is not None:
            require_setup(self.start(one, Run(command=one.spec.setup)).wait())
        return ports

    def start(self, one: Environment, run: Run) -> "ContainerCommand":
        limits = one.spec.limits
        timeout_s = min(run.timeout_s or limits.wall_s, limits.wall_s)
        return ContainerCommand(self._engine, self.name(one), run, timeout_s, limits.output_bytes)

    def remove(self, one: Environment) -> None:
        self._remove_containers([self.name(one)])
        place(self._root, one).remove()

    def tidy(self, kept: Collection[int]) -> None:
        of_ours = f"label={_LABEL}={self._label}"
        names = ask(self._engine, "ps", "--all", "--filter", of_ours, "--format", "{{.Names}}")
        listed = names.split()
        keep = {f"conserve-{self._label}-{number}" for number in kept}
        self._remove_containers([name for name in listed if name not in keep])
        # A restart ends what a predecessor's commands still run in kept containers.
        for name in listed:
            if name in keep:
                ask(self._engine, "restart", "--time", "0", name)

    def _remove_containers(self, names: list[str]) -> None:
        for name in names:
            ask(self._engine, "rm", "--force", "--volumes", name, missing_is_fine=True)


class ContainerCommand:
    """A command in a container, ended with all else there; raises `SandboxError` at its start."""

    def __init__(
        self, engine: str, name: str, run: Run, timeout_s: float, output_bytes: int
    ) -> None:
        self._engine = engine
        self._name = name
        self._output_bytes = output_bytes
        self._began_s = time.monotonic()
        self._deadline_s = self._began_s + timeout_s
        self._was_cut = False
        stdin = launcher.file_of(run.stdin)
        try:
            self._process = subprocess.Popen(
                [engine, "exec", "--interactive", name, *run.arguments],
                stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            _fail(engine, error)
        finally:
            os.close(stdin)

    def cut(self) -> None:
        self._was_cut = True
        self._process.kill()

    def wait(self) -> CommandDone:
        with self._process:
            stdout, stderr, _, dropped = read_outputs(
                self._process, None, self._output_bytes, self._deadline_s
            )
            timed_out = time.monotonic() >= self._deadline_s
            if timed_out or self._was_cut:
                self._process.kill()
                # The command outlives ``docker exec``.
                ask(self._engine, "restart", "--time", "0", self._name)
        code = self._process.returncode
        said = stderr.decode(errors="replace")
        if code == _NOT_ASKED:
            raise SandboxError(f"the container cannot be asked: {said[-300:].strip()}")
        reason = "it was ended from outside" if self._was_cut else None
        return CommandDone(
            exit_code=code if code >= 0 else 128 - code,
            stdout=stdout.decode(errors="replace"),
            stderr=said,
            truncated=dropped,
            timed_out=timed_out,
            reason="it took longer than it may" if timed_out else reason,
            wall_s=round(time.monotonic() - self._began_s, 4),
            isolation=Containers.isolation,
        )


Backend = Processes | Containers
Running = Command | ContainerCommand


def ask(
    engine: str, *words: str, timeout_s: float = _ANSWER_S, missing_is_fine: bool = False
) -> str:
    """Return the program's answer; raises `SandboxError` if it fails."""
    try:
        done = subprocess.run(
            [engine, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=timeout_s, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        _fail(engine, error)
    if done.returncode and not (missing_is_fine and "no such container" in done.stderr.lower()):
        raise SandboxError(f"{engine} {words[0]}: {done.stderr[-300:].strip()}")
    return done.stdout


def _fail(engine: str, error: Exception) -> NoReturn:
    raise SandboxError(f"{engine} does not answer: {error}") from error


def find_engine() -> str:
    """Return the program that runs containers here; raises `SandboxError` if none answers."""
    tried = []
    for name in ("docker", "podman"):
        if shutil.which(name) is None:
            tried.append(f"{name} is not installed")
            continue
        with contextlib.suppress(SandboxError):
            # Only a running daemon answers this.
            ask(name, "info", "--format", "{{json .}}")
            return name
        tried.append(f"{name} does not answer: its daemon may not run")
    raise SandboxError(
        f"no program runs containers on the head node ({'; '.join(tried)}); ask for kind "
        "'process', or have `docker` or `podman` answer there"
    )
