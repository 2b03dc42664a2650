"""Runs a command within its limits, and leaves none of its processes behind.

Each command runs below a `launcher` process. This file starts it, reads outputs, and finds
processes that got away from it.
"""

import contextlib
import json
import logging
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from conserve_tools import launcher
from conserve_tools.answers import CommandDone, Isolation
from conserve_tools.spec import Limits, Run

logger = logging.getLogger("conserve.environments")

# Environment variable of every process in an environment; begins with the environments' root.
MARKER = "CONSERVE_ENVIRONMENT"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# User ids of environments, if the manager may choose: no system assigns these by itself.
_FIRST_UID = 1_900_000_000
# Time for a launcher to start, and to end everything that its command has started.
_OVERHEAD_S = 30.0
# Time to read what is left in a pipe when its writers have gone.
_LAST_WORDS_S = 2.0

_WHY = {
    "timeout": "it took longer than it may",
    "memory": "it took more memory than limits.memory_bytes",
    "processes": "it had more processes than limits.processes",
    "disk": "the environment's files take more than limits.disk_bytes",
    "cpu": "a process took more CPU time than limits.cpu_s",
    "cut": "it was ended from outside",
}


class SandboxError(RuntimeError):
    """A command could not be run; the message says why."""


@dataclass(frozen=True, slots=True)
class Place:
    """The files, user and ports of an environment; ``slot`` tells its user from others'."""

    root: Path
    number: int
    slot: int
    ports: tuple[int, ...] = ()

    @property
    def folder(self) -> Path:
        return self.root / str(self.number)

    @property
    def uid(self) -> int | None:
        """The user that its commands run as; None: the manager's own, who may not choose."""
        return _FIRST_UID + self.slot if os.geteuid() == 0 else None

    def make(self) -> None:
        """Make its folders anew, empty; raises `SandboxError` if they cannot be made."""
        try:
            self.remove()
            for name in ("home", "tmp"):
                path = self.folder / name
                path.mkdir(parents=True)
                path.chmod(0o700)
                if self.uid is not None:
                    os.chown(path, self.uid, self.uid)
            # Without namespaces, its user has to pass through this folder.
            self.folder.chmod(0o711)
        except OSError as error:
            raise SandboxError(f"its folder cannot be made: {error.strerror}") from error

    def remove(self) -> None:
        remove_tree(self.folder)


class Sandbox:
    """Runs commands, with namespaces if there are any (`namespaces_missing`), or a network."""

    def __init__(self, *, namespaces: bool, network: bool) -> None:
        self.namespaces = namespaces
        self.isolation: Isolation = "namespaces" if namespaces else "limits"
        self._network = network

    def start(self, place: Place, run: Run, limits: Limits) -> "Command":
        timeout_s = min(run.timeout_s or limits.wall_s, limits.wall_s)
        marker = f"{place.root}:{place.number}"
        order = {
            "arguments": run.arguments,
            "environment": self._variables(place, marker),
            "stdin": run.stdin,
            "root": str(place.root),
            "home": str(place.folder / "home"),
            "tmp": str(place.folder / "tmp"),
            "uid": place.uid,
            "limits": limits.model_dump(),
            "timeout_s": timeout_s,
            "namespaces": self.namespaces,
            "network": self._network,
            "others": 0 if self.namespaces or place.uid is not None else _tasks_of(os.getuid()),
        }
        return Command(order, limits.output_bytes, self.isolation)

    def _variables(self, place: Place, marker: str) -> dict[str, str]:
        home, tmp = ("/home", "/tmp")
        if not self.namespaces:
            home, tmp = (str(place.folder / name) for name in ("home", "tmp"))
        variables = {"PATH": _PATH, "HOME": home, "TMPDIR": tmp, "LANG": "C.UTF-8", MARKER: marker}
        if place.ports:
            variables["PORT"] = str(place.ports[0])
            variables["PORTS"] = " ".join(map(str, place.ports))
        return variables


class Command:
    """A running command; raises `SandboxError` if it cannot be started."""

    def __init__(self, order: dict[str, Any], output_bytes: int, isolation: Isolation) -> None:
        self._isolation = isolation
        self._marker = order["environment"][MARKER]
        self._output_bytes = output_bytes
        self._deadline_s = time.monotonic() + order["timeout_s"] + _OVERHEAD_S
        self._result, result = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", launcher.__file__, str(result)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                env={MARKER: self._marker, "PATH": _PATH}, cwd="/", pass_fds=[result],
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            os.close(self._result)
            raise SandboxError(f"no process can be started: {error.strerror}") from error
        finally:
            os.close(result)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()

    def cut(self) -> None:
        """End it; `wait` returns soon. May be called from another thread."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def wait(self) -> CommandDone:
        """Return when it and its processes have ended; raises `SandboxError`."""
        try:
            stdout, stderr, said, dropped = read_outputs(
                self._process, self._result, self._output_bytes, self._deadline_s
            )
        finally:
            with self._process:
                self.cut()
                self._process.kill()
            os.close(self._result)
        if not said.endswith(b"\n"):
            # The launcher, which finds the command's processes, was killed.
            kill_marked(self._marker)
            raise SandboxError("the process above the command was lost; it may have run in part")
        told = json.loads(said)
        if told["error"] is not None:
            raise SandboxError(f"the command could not be begun: {told['error']}")
        why = told["why"]
        return CommandDone(
            exit_code=told["exit_code"],
            stdout=stdout.decode(errors="replace"),
            stderr=stderr.decode(errors="replace"),
            truncated=dropped,
            timed_out=why == "timeout",
            reason=None if why is None else _WHY[why],
            wall_s=round(told["wall_s"], 4),
            isolation=self._isolation,
        )


def read_outputs(
    process: subprocess.Popen[bytes], result: int | None, most_bytes: int, deadline_s: float
) -> tuple[bytes, bytes, bytes, bool]:
    """Return what a process writes, up to ``most_bytes`` an output, and whether there was more.

    The third output, ``result``, is where a launcher writes the outcome: once it has ended, no
    known process can write. ``deadline_s`` is by `time.monotonic`.
    """
    assert process.stdout is not None
    assert process.stderr is not None
    stdout, stderr = process.stdout.fileno(), process.stderr.fileno()
    parts = {stdout: b"", stderr: b""}
    dropped = False
    with selectors.DefaultSelector() as selector:
        for file in (stdout, stderr, result):
            if file is not None:
                selector.register(file, selectors.EVENT_READ)
        parts[-1 if result is None else result] = b""
        while selector.get_map():
            ready = selector.select(max(0.0, deadline_s - time.monotonic()))
            for key, _ in ready:
                part = os.read(key.fd, 1 << 16)
                if not part:
                    selector.unregister(key.fd)
                    if key.fd == result:
                        grace_s = _LAST_WORDS_S if parts[key.fd] else 0.0
                        deadline_s = min(deadline_s, time.monotonic() + grace_s)
                room = most_bytes - len(parts[key.fd]) if key.fd != result else 1 << 16
                dropped |= len(part) > room
                parts[key.fd] += part[:room]
            if not ready and time.monotonic() >= deadline_s:
                break
    kept_out, kept_err, said = parts.values()
    return kept_out, kept_err, said, dropped


def namespaces_missing(root: Path) -> str | None:
    """Return why commands cannot have namespaces on this machine, by trying one in ``root``."""
    place = Place(root, 0, 0)
    try:
        place.make()
        sandbox = Sandbox(namespaces=True, network=False)
        outcome = sandbox.start(place, Run(command=["true"]), Limits()).wait()
    except (SandboxError, OSError) as error:
        return str(error)
    finally:
        place.remove()
    return None if outcome.exit_code == 0 else f"a first command failed: {outcome.stderr[-200:]}"


def remove_tree(folder: Path) -> None:
    """Remove a folder, if there is one, with contents that its owner may not read."""

    def open_up(function: Any, path: str, error: Any) -> None:
        if isinstance(error[1], FileNotFoundError):
            return
        # A folder needs permissions to be emptied, and so does the one above it.
        above = os.path.dirname(path)
        for one in (above, path):
            if os.path.isdir(one) and not os.path.islink(one):
                os.chmod(one, 0o700)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)

    if folder.exists():
        shutil.rmtree(folder, onerror=open_up)


def marked(marker: str, *, exactly: bool = False) -> list[psutil.Process]:
    """Return the processes that have this marker, or unless ``exactly`` one that begins so."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            own = process.environ().get(MARKER, "")
            if own == marker or (own.startswith(marker) and not exactly):
                found.append(process)
    return found


def kill_marked(marker: str, *, exactly: bool = True) -> int:
    """Kill all processes that `marked` returns; return how many there were."""
    killed: set[int] = set()
    while True:
        left = []
        for process in marked(marker, exactly=exactly):
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE:
                    left.append(process)
        # Look again, as they may start others meanwhile.
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        if not left:
            return len(killed)
        killed |= {process.pid for process in left}
        psutil.wait_procs(left, timeout=1)


def _tasks_of(uid: int) -> int:
    """Return a user's threads, which count against its limit of processes."""
    total = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.uids().real == uid:
                total += process.num_threads()
    return total
