"""The plugin that leaves nothing behind of an engine whose processes end."""

import signal
import subprocess
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from deployments.engine import engine_end

# A replica, its core, and the core's worker, which says who all three are.
_REPLICA = """
import multiprocessing, os, sys, time
from deployments.engine import engine_end

def core(names):
    engine_end.end_with_parent()
    engine_end.end_with_parent()
    spawn.Process(target=worker, args=([*names, os.getpid()],)).start()
    time.sleep(600)

def worker(names):
    engine_end.end_with_parent()
    print(*names, os.getpid(), flush=True)
    time.sleep(600)

spawn = multiprocessing.get_context("spawn")
if __name__ == "__main__":
    engine_end.end_with_parent()
    spawn.Process(target=core, args=([os.getpid()],)).start()
    time.sleep(600)
"""


def test_vllm_finds_the_plugin() -> None:
    found = {plugin.name: plugin for plugin in entry_points(group="vllm.general_plugins")}
    assert found["conserve_engine_end"].load() is engine_end.register


def _has_ended(process: psutil.Process) -> bool:
    # A replica that only sleeps does not wait for its child, which stays a zombie.
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("killed", [0, 1])
def test_processes_end_with_the_one_that_started_them(tmp_path: Path, killed: int) -> None:
    file = tmp_path / "replica.py"
    file.write_text(_REPLICA)
    replica = subprocess.Popen([sys.executable, str(file)], stdout=subprocess.PIPE, text=True)
    assert replica.stdout is not None
    family = [psutil.Process(int(pid)) for pid in replica.stdout.readline().split()]
    try:
        assert len(family) == 3
        family[killed].send_signal(signal.SIGKILL)
        deadline_s = time.monotonic() + 60
        while not all(map(_has_ended, family[killed:])):
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        # Nobody else's end follows from it.
        assert all(process.is_running() for process in family[:killed])
    finally:
        for process in family:
            if process.is_running():
                process.kill()
        replica.communicate()


_SIZE = 100_000

# vLLM's own buffer in another process, opened as its workers open it.
_READER = f"""
import sys
from deployments.engine import engine_end
engine_end.share_without_names()
from vllm.distributed.device_communicators.shm_broadcast import ShmRingBuffer
buffer = ShmRingBuffer(1, {_SIZE}, 2, sys.argv[1])
with buffer.get_data(1) as data:
    data[:5] = bytes(reversed(data[:5]))
"""


def test_what_vllm_shares_is_in_no_folder() -> None:
    """Its own ring buffer, written by one process and read by another."""
    code = f"""
import os, subprocess, sys
from conserve.shared_memory import mapped
from deployments.engine import engine_end
engine_end.share_without_names()
from vllm.distributed.device_communicators.shm_broadcast import ShmRingBuffer
buffer = ShmRingBuffer(1, {_SIZE}, 2)
with buffer.get_data(1) as data:
    data[:5] = b"token"
subprocess.run([sys.executable, "-c", {_READER!r}, buffer.handle()[3]], check=True)
with buffer.get_data(1) as data:
    print(bytes(data[:5]).decode(), len(mapped([os.getpid()])))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["nekot", "0"], done.stderr


def test_another_vllm_is_left_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other = SimpleNamespace()
    package = "vllm.distributed.device_communicators"
    monkeypatch.setitem(sys.modules, package, SimpleNamespace(shm_broadcast=other))
    monkeypatch.setattr(engine_end.logger, "propagate", True)
    engine_end.share_without_names()
    assert vars(other) == {}
    assert "adapt deployments/engine/engine_end.py" in caplog.text
