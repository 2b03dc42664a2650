"""A peer under a process of its own, so that several are up at once and each stops alone.

Stopping a peer ends every descendant of the process that started it, so each has a process to
itself. That ends, with its peer, when the pipe that it reads closes: nothing outlives its caller.
``python -m conserve_lab.peers.apart NAME`` is that process: it reads options as a line of JSON, and
says in others what becomes of it.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from conserve_lab.peers.plan import Options, PeerUnavailable
from conserve_lab.peers.running import Peer, start

# A Serve application and its Ray end within some 45 seconds; one that does not is ended.
_STOP_S = 120.0


@dataclass(frozen=True)
class Apart:
    """A peer that is up and warm, and the process above everything that belongs to it."""

    peer: Peer
    process: psutil.Process

    def memory_bytes(self) -> int:
        """Memory of all its processes; pages that they share count once."""
        return int(sum(_each(self.process, lambda one: float(one.memory_full_info().pss))))

    def cpu_s(self) -> float:
        return sum(_each(self.process, lambda one: sum(one.cpu_times()[:2])))


def _each(above: psutil.Process, ask: Callable[[psutil.Process], float]) -> Iterator[float]:
    for process in (above, *above.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            yield ask(process)


@contextlib.contextmanager
def start_apart(name: str, options: Options, on_progress: Callable[[str], None]) -> Iterator[Apart]:
    """Start a peer as `conserve_lab.peers.start` does; blocks need not be nested."""
    command = [sys.executable, "-m", __spec__.name, name]
    # In a session of its own: Ctrl-C reaches the caller, whose block's end stops it.
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        sent = asdict(options) | {"logs": options.logs and str(options.logs)}
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(json.dumps(sent) + "\n")
            child.stdin.flush()
        yield Apart(_ready(name, child.stdout, on_progress), psutil.Process(child.pid))
    finally:
        _stop(child)


def _ready(name: str, lines: IO[str], on_progress: Callable[[str], None]) -> Peer:
    # The child has a time limit of its own, so it says something, or ends.
    for line in lines:
        said: dict[str, Any] = json.loads(line)
        if "peer" in said:
            return Peer(**said["peer"])
        if "failed" in said:
            raise PeerUnavailable(said["failed"])
        on_progress(said["progress"])
    raise PeerUnavailable(f"{name}: the process that was to start it ended; see what it said")


def _stop(child: subprocess.Popen[str]) -> None:
    for pipe in (child.stdin, child.stdout):
        with contextlib.suppress(BrokenPipeError):
            assert pipe is not None
            pipe.close()
    try:
        child.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        below = psutil.Process(child.pid).children(recursive=True)
        for process in (psutil.Process(child.pid), *below):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        child.wait()


def main() -> None:
    # The caller's session may ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    given = json.loads(sys.stdin.readline())
    threading.Thread(target=_interrupt_at_end, daemon=True).start()
    try:
        options = _options(given)
        with start(sys.argv[1], options, lambda text: _say(progress=text)) as peer:
            _say(peer=asdict(peer))
            threading.Event().wait()
    except (PeerUnavailable, ValueError) as error:
        _say(failed=str(error))
    except KeyboardInterrupt:
        pass


def _options(given: dict[str, Any]) -> Options:
    cores, logs = given["cores"], given["logs"]
    own = {"cores": cores and tuple(cores), "logs": logs and Path(logs)}
    return Options(**(given | own))


def _interrupt_at_end() -> None:
    # By its number: the interpreter cannot end while a thread waits in sys.stdin.
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGINT)


def _say(**what: object) -> None:
    # No reader is left, so the pipe that is read has closed too.
    with contextlib.suppress(BrokenPipeError):
        os.write(1, json.dumps(what).encode() + b"\n")


if __name__ == "__main__":
    main()
