"""Runs environments in containers, through a program with Docker's command line."""

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

from conserve.environments import Environment, Run
from conserve.settings import EnvironmentSettings
from deployments.answers import Isolation
from deployments.environments.processes import choose_ports, place, require_setup
from deployments.environments.sandbox import Outcome, SandboxError, read_outputs

logger = logging.getLogger("conserve.environments")

_ANSWER_S = 20.0
# Downloading an image may take long.
_PULL_S = 600.0
_LABEL = "conserve.environments"
# Exit code of ``docker exec`` if it could not run the command.
_NOT_ASKED = 125


class Containers:
    """Environments that are containers: one process that waits, and commands beside it.

    Memory, processes and a command's time are limited. The home is a folder of this machine.

    Args:
        engine: the program.
        root: all environments' folder.
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
        try:
            where.make()
        except OSError as error:
            raise SandboxError(f"its folder cannot be made: {error.strerror}") from error
        user = where.uid or os.getuid()
        limits = one.spec.limits
        network = ["--network", "bridge" if self._settings.network else "none"]
        if self._settings.network:
            network += [word for port in ports for word in ("-p", f"127.0.0.1:{port}:{port}")]
        self._ask(
            "run", "--detach", "--init", "--name", self.name(one),
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
        listed = self._ask(
            "ps", "--all", "--filter", f"label={_LABEL}={self._label}", "--format", "{{.Names}}"
        )
        keep = {f"conserve-{self._label}-{number}" for number in kept}
        self._remove_containers([name for name in listed.split() if name not in keep])
        # A restart ends what a predecessor's commands still run in kept containers.
        for name in listed.split():
            if name in keep:
                self._ask("restart", "--time", "0", name)

    def _remove_containers(self, names: list[str]) -> None:
        for name in names:
            self._ask("rm", "--force", "--volumes", name, missing_is_fine=True)

    def _ask(self, *words: str, timeout_s: float = _ANSWER_S, missing_is_fine: bool = False) -> str:
        return ask(self._engine, *words, timeout_s=timeout_s, missing_is_fine=missing_is_fine)


class ContainerCommand:
    """A command in a container. Ending it ends everything else in the container.

    Raises `SandboxError` if it cannot be started.
    """

    def __init__(
        self, engine: str, name: str, run: Run, timeout_s: float, output_bytes: int
    ) -> None:
        self._engine = engine
        self._name = name
        self._output_bytes = output_bytes
        self._began_s = time.monotonic()
        self._deadline_s = self._began_s + timeout_s
        self._was_cut = False
        # A file needs no thread that writes to a pipe.
        stdin = os.memfd_create("stdin")
        try:
            with open(os.dup(stdin), "wb") as writer:
                writer.write(run.stdin.encode("utf-8", "surrogatepass"))
            os.lseek(stdin, 0, os.SEEK_SET)
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

    def wait(self) -> Outcome:
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        outputs = (self._process.stdout.fileno(), self._process.stderr.fileno())
        stdout, stderr, _, dropped = read_outputs(
            *outputs, None, self._output_bytes, self._deadline_s
        )
        timed_out = time.monotonic() >= self._deadline_s
        if timed_out or self._was_cut:
            self._process.kill()
            # The command outlives ``docker exec``.
            ask(self._engine, "restart", "--time", "0", self._name)
        code = self._process.wait()
        self._process.stdout.close()
        self._process.stderr.close()
        said = stderr.decode(errors="replace")
        if code == _NOT_ASKED:
            raise SandboxError(f"the container cannot be asked: {said[-300:].strip()}")
        reason = "it was ended from outside" if self._was_cut else None
        return Outcome(
            exit_code=code if code >= 0 else 128 - code,
            stdout=stdout.decode(errors="replace"),
            stderr=said,
            truncated=dropped,
            timed_out=timed_out,
            reason="it took longer than it may" if timed_out else reason,
            wall_s=time.monotonic() - self._began_s,
        )


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
