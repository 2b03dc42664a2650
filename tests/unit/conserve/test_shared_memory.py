"""What a killed process leaves in shared memory goes; what others use stays."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from conserve import shared_memory
from conserve.shared_memory import Leftovers, mapped, remove

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

    def kill(self, *processes: psutil.Process) -> None:
        """All of it, the one that would have cleaned up included."""
        for process in processes or self.all:
            if process.is_running():
                process.send_signal(signal.SIGKILL)
        psutil.wait_procs(list(processes or self.all), timeout=10)
        self.process.poll()

    def end(self) -> None:
        """Nothing is left of it."""
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


def test_a_killed_engine_leaves_nothing(engine: Engine) -> None:
    leftovers = Leftovers()
    leftovers.watch(engine.pid)
    leftovers.look()
    leftovers.watch(engine.pid)
    engine.kill()
    assert engine.memory.exists()
    leftovers.look()
    assert not any(file.exists() for file in engine.files)
    # It is forgotten: looking again is about nobody.
    assert leftovers._files == leftovers._processes == {}
    leftovers.look()


def test_nothing_goes_while_any_process_of_it_lives(engine: Engine) -> None:
    leftovers = Leftovers()
    leftovers.watch(engine.pid)
    leftovers.look()
    engine.kill(engine.all[0])
    leftovers.look()
    assert all(file.exists() for file in engine.files)
    engine.kill()
    leftovers.look()
    assert not any(file.exists() for file in engine.files)


def test_the_memory_of_others_stays(engine: Engine) -> None:
    leftovers = Leftovers()
    leftovers.watch(engine.pid)
    leftovers.look()
    other = Engine()
    try:
        engine.kill()
        leftovers.look()
        assert other.memory.exists()
    finally:
        other.end()


def test_a_process_that_gets_the_number_later_is_not_taken_for_the_engine(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    leftovers = Leftovers()
    leftovers.watch(engine.pid)
    leftovers.look()
    engine.kill()
    other = Engine()
    try:
        # What psutil says of that number from now on.
        reused = SimpleNamespace(**vars(psutil))
        reused.Process = lambda pid: psutil.Process(other.pid if pid == engine.pid else pid)
        monkeypatch.setattr(shared_memory, "psutil", reused)
        leftovers.look()
        assert not any(file.exists() for file in engine.files)
        assert other.memory.exists()
        assert leftovers._files == {}
    finally:
        monkeypatch.undo()
        other.end()


def test_an_engine_that_was_never_seen_alive_is_nothing() -> None:
    leftovers = Leftovers()
    leftovers.watch(2**22 + 1)
    leftovers.look()
    assert leftovers._files == {}


def test_what_is_gone_already_does_not_count(tmp_path: Path) -> None:
    there = tmp_path / "psm_there"
    there.touch()
    assert remove([there, tmp_path / "psm_gone"]) == 1
    assert not there.exists()
