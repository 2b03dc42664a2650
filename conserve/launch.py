"""Runs the application as a child, waits for it, and leaves no process behind."""

import contextlib
import ctypes
import fcntl
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import httpx
import psutil

from conserve.wire import START_PHASES

_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.5
_TOLD_S = 3.0
_KILLED_WITHIN_S = 20.0
# The application's log and the one before it have at most some more than this each.
_LOG_BYTES = 64 * 2**20
_LOG_LOOK_S = 5.0
# Of ended runs: how many keep their log, and Ray's session folder.
_KEPT = 4
# POSIX shared memory and semaphores that Python makes are files, which a killed process leaves. A
# running engine has none (`named_shared_memory` of deployments/upstream), others may.
_SHARED_MEMORY = Path("/dev/shm")
_MADE_BY_PYTHON = ("psm_", "sem.mp-")
# Names the process of `Launch` in the environment of all that it starts.
LAUNCHER = "CONSERVE_LAUNCHER"


class LaunchError(RuntimeError):
    """The application did not start; the message has its last errors, and names the log."""


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Ignore signals that would leave processes behind; only in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in signals}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class Launch:
    """A running application, as a context manager.

    All processes that it starts (Ray, Serve, engines, LMCache) remain descendants of this process,
    so that `stop` finds them even if those between have died.

    Args:
        arguments: for ``serve run conserve.app``, such as ``decoders=3``.
        environment: variables on top of this process's own.
        command: runs instead of ``serve run``, for peers.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        command: Sequence[str] | None = None,
    ) -> None:
        serve = [sys.executable, "-m", "ray.serve.scripts", "run", "conserve.app", *arguments]
        self._command = list(command or serve)
        own = {"RAY_USAGE_STATS_ENABLED": "0", LAUNCHER: str(os.getpid())}
        self._environment = {**os.environ, **own, **(environment or {})}
        self._log_path = log
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        _adopt_orphans()
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log_path.write_bytes(b"")
        # Appending, so that it can be emptied while they write.
        with self._log_path.open("ab") as log:
            hold(log.fileno())
            # A session of its own, so that Ctrl-C reaches it only through `stop`.
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )
        threading.Thread(target=self._bound_log, args=[self._process], daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def wait(self) -> int:
        assert self._process is not None
        return self._process.wait()

    def drain(self, timeout_s: float) -> bool:
        """Have the application finish what runs and end; return whether it has in time."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return not self.running

    def wait_until_serving(
        self,
        url: str,
        prefillers: int,
        decoders: int,
        timeout_s: float = 600.0,
        on_progress: Callable[[str], None] | None = None,
        encoders: int = 0,
    ) -> dict[str, float]:
        """Wait until these numbers of engines are ready; return each phase's seconds.

        Raises:
            LaunchError: the application ended, or was not ready in time.
        """
        deadline_s = time.monotonic() + timeout_s
        wanted = {"prefillers": prefillers, "decoders": decoders, "encoders": encoders}
        phases: dict[str, float] = {}
        since_s = time.monotonic()
        while True:
            state = health(url)
            phase = _phase(state, sum(wanted.values()))
            now_s = time.monotonic()
            phases[phase] = phases.get(phase, 0.0) + now_s - since_s
            since_s = now_s
            ready = {role: state.get(role, 0) for role in wanted}
            if all(ready[role] >= count for role, count in wanted.items()):
                return phases
            if on_progress is not None:
                of_all = f" ({_ready(state)} of {sum(wanted.values())} engines ready)"
                on_progress(phase + (of_all if state else ""))
            if not self.running:
                raise LaunchError(f"the application ended while it started.\n{self._last_words()}")
            if time.monotonic() > deadline_s:
                shown = ", ".join(f"{ready[role]} {role}" for role in wanted if wanted[role])
                raise LaunchError(
                    f"not ready after {timeout_s:g} s (engines ready: {shown}).\n"
                    f"{self._last_words()}"
                )
            time.sleep(_POLL_S)

    @_undisturbed()
    def stop(self, grace_s: float = 20.0) -> None:
        """End the application and everything that it started; cannot be interrupted."""
        if self._process is None:
            return
        known = _descendants()
        in_memory = shared_memory_of(process.pid for process in known)
        if self._process.poll() is None:
            # Like Ctrl-C: Serve shuts the application down, then Ray ends.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_s)
        _kill(known, in_memory)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._process = None

    def _bound_log(self, process: "subprocess.Popen[bytes]") -> None:
        while process.poll() is None:
            time.sleep(_LOG_LOOK_S)
            with contextlib.suppress(OSError):
                bound(self._log_path, _LOG_BYTES)

    def _last_words(self) -> str:
        text = self._log_path.read_text(errors="replace")
        return "\n".join([*_errors(text), f"The whole log: {self._log_path}"])


def bound(log: Path, most_bytes: int) -> None:
    """Move what a file has beyond its bound to ``FILE.1``, in the place of what was there.

    Its writers append, and keep it open. What they write between the copy and its end is lost.
    """
    if log.stat().st_size > most_bytes:
        shutil.copyfile(log, log.with_name(log.name + ".1"))
        os.truncate(log, 0)


def hold(file: int) -> None:
    """Lock an open file, so that `ended` leaves it out while a process has it open."""
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def ended(files: Iterable[Path]) -> list[Path]:
    """Return those of this user's files that no process holds, but for the last few by name."""
    found = []
    for file in sorted(files)[:-_KEPT]:
        with contextlib.suppress(OSError), file.open() as opened:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(opened.fileno()).st_uid == os.getuid():
                found.append(file)
    return found


def end_with_launcher(grace_s: float) -> None:
    """Have this process and all that it starts be killed once the process of `Launch` has ended.

    Args:
        grace_s: how long it may take to end by itself, at SIGINT; 0: it gets none.
    """
    if launcher := os.environ.get(LAUNCHER):
        _adopt_orphans()
        threading.Thread(target=_end_with, args=[int(launcher), grace_s], daemon=True).start()


def _end_with(launcher: int, grace_s: float) -> None:
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(launcher)], [], [])
    if grace_s:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(grace_s)
    left = _descendants()
    _kill(left, shared_memory_of(process.pid for process in left))
    os._exit(1)


def _phase(state: Mapping[str, Any], engines: int) -> str:
    """Return the phase of the engines that are furthest behind, from the answer of `health`."""
    if not state:
        return "starting Ray and Serve"
    starting = state.get("starting", {})
    if _ready(state) + sum(starting.values()) < engines:
        return "loading vLLM"
    return next((phase for phase in START_PHASES if starting.get(phase)), START_PHASES[-1])


def _ready(state: Mapping[str, Any]) -> int:
    return sum(state.get(role, 0) for role in ("prefillers", "decoders", "encoders"))


def _errors(log: str) -> list[str]:
    """Return a log's lines about errors, each once: the first ones and the last."""
    found: dict[str, str] = {}
    for line in log.splitlines():
        if "Error" in line or "error" in line:
            # Without colours and process names.
            bare = re.sub(r"^(\([^)]*\)\s*)+", "", re.sub(r"\x1b\[[0-9;]*m", "", line))
            found.setdefault(re.sub(r"\d+", "", bare), bare)
    lines = list(found.values())
    # It says all by itself, and the others only where it came from.
    if refused := [line for line in lines if "PatchError: " in line]:
        return [refused[0].partition("PatchError: ")[2]]
    return lines if len(lines) <= 10 else [*lines[:6], "...", *lines[-4:]]


def health(url: str) -> dict[str, Any]:
    """Return the body of ``GET /health``, whatever its status; empty without an answer."""
    try:
        # This machine's own certificate is for the name by which clients know it.
        body = httpx.get(f"{url}/health", timeout=15, verify=False, trust_env=False).json()
    except (httpx.HTTPError, ValueError):
        body = None
    return body if isinstance(body, dict) else {}


def _adopt_orphans() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _kill(left: list[psutil.Process], in_memory: Iterable[Path]) -> None:
    """Kill these and all processes below this one, and remove this shared memory."""
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    # One that holds GPUs' power caps puts them back.
    _, left = psutil.wait_procs(left, timeout=_TOLD_S)
    for file in in_memory:
        file.unlink(missing_ok=True)
    # Processes that end may start others, and a busy kernel needs time.
    deadline_s = time.monotonic() + _KILLED_WITHIN_S
    while (left := [*left, *_descendants()]) and time.monotonic() < deadline_s:
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        _, left = psutil.wait_procs(left, timeout=1)


def _descendants() -> list[psutil.Process]:
    return list(psutil.Process().children(recursive=True))


def shared_memory_of(pids: Iterable[int]) -> set[Path]:
    """Return the shared memory and semaphores, made by Python, that these processes use."""
    inodes = set()
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            continue  # It has ended, or is another user's.
        for line in text.splitlines():
            # address, permissions, offset, device, inode, path
            if "/dev/shm/" in line:
                inodes.add(int(line.split(maxsplit=5)[4]))
    if not inodes:
        return set()
    with os.scandir(_SHARED_MEMORY) as files:
        made = [file for file in files if file.name.startswith(_MADE_BY_PYTHON)]
    # By inode, since a semaphore had another name when it was mapped.
    return {Path(file.path) for file in made if file.inode() in inodes}
