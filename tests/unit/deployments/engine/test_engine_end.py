"""The plugin that ends an engine's processes with the one that started them."""

import signal
import subprocess
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path

import psutil
import pytest

from deployments.engine import engine_end, engine_kernels
from deployments.upstream.patches import patch_engine

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


def test_vllm_finds_the_plugins() -> None:
    found = {plugin.name: plugin for plugin in entry_points(group="vllm.general_plugins")}
    assert found["conserve_engine_end"].load() is engine_end.end_with_parent
    assert found["conserve_engine_kernels"].load() is engine_kernels.register
    assert found["conserve_patches"].load() is patch_engine


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
