"""The shared memory of a killed process is seen while it lives, and removed."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from conserve.shared_memory import mapped, remove

# An engine: a process, and below it one that made the memory, like vLLM's core.
_CHILD = """
import sys, time
from multiprocessing import get_context
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=100_000)
lock = get_context("spawn").Lock()
print(memory.name, flush=True)
time.sleep(600)
"""
_ENGINE = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", {_CHILD!r}])
"""


class Engine:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _ENGINE], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.memory = Path("/dev/shm") / self.process.stdout.readline().strip()
        self.pid = self.process.pid
        self.all = [psutil.Process(self.pid), *psutil.Process(self.pid).children(recursive=True)]
        self.files = mapped(process.pid for process in self.all)

    def kill(self) -> None:
        """Kill all processes, also the one that would have cleaned up."""
        for process in self.all:
            if process.is_running():
                process.send_signal(signal.SIGKILL)
        psutil.wait_procs(self.all, timeout=10)
        self.process.poll()

    def end(self) -> None:
        self.kill()
        remove(self.files)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.end()


def test_what_a_process_uses_is_seen(engine: Engine) -> None:
    assert engine.memory in engine.files
    kinds = {file.name.partition("_")[0].partition("-")[0] for file in engine.files}
    assert kinds == {"psm", "sem.mp"}
    assert mapped([engine.pid]) == set()
    assert mapped([2**22 + 1]) == set()


def test_what_a_killed_process_leaves_goes(engine: Engine) -> None:
    engine.kill()
    assert engine.memory.exists()
    assert remove(engine.files) == len(engine.files)
    assert not any(file.exists() for file in engine.files)


def test_what_is_gone_already_does_not_count(tmp_path: Path) -> None:
    there = tmp_path / "psm_there"
    there.touch()
    assert remove([there, tmp_path / "psm_gone"]) == 1
    assert not there.exists()
