"""The plugin that ends an engine's processes with the one that started them."""

import signal
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import psutil
import pytest

from deployments.engine import engine_end

# A replica, its core, and the core's worker, which says who all three are.
_REPLICA = """
import multiprocessing, os, sys, time
from deployments.engine import engine_end

def core(names):
    engine_end.register()
    engine_end.register()
    spawn.Process(target=worker, args=([*names, os.getpid()],)).start()
    time.sleep(600)

def worker(names):
    engine_end.register()
    print(*names, os.getpid(), flush=True)
    time.sleep(600)

spawn = multiprocessing.get_context("spawn")
if __name__ == "__main__":
    engine_end.register()
    spawn.Process(target=core, args=([os.getpid()],)).start()
    time.sleep(600)
"""

# A replica, and its core, which says what it has in shared memory. As vLLM does, it does not leave
# that to Python's own tracker, which would go with those that it tracks.
_SHARING = """
import multiprocessing, os, time
from multiprocessing import resource_tracker, shared_memory
from deployments.engine import engine_end

def core():
    engine_end.register()
    memory = shared_memory.SharedMemory(create=True, size=4096)
    resource_tracker.unregister(memory._name, "shared_memory")
    print(memory.name, flush=True)
    time.sleep(600)

spawn = multiprocessing.get_context("spawn")
if __name__ == "__main__":
    spawn.Process(target=core).start()
    time.sleep(600)
"""


def test_vllm_finds_the_plugin() -> None:
    found = {plugin.name: plugin for plugin in entry_points(group="vllm.general_plugins")}
    assert found["conserve_engine_end"].load() is engine_end.register


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
        _, left = psutil.wait_procs(family[killed:], timeout=10)
        # A replica that only sleeps does not wait for its child.
        assert [process for process in left if process.status() != psutil.STATUS_ZOMBIE] == []
        # Nobody else's end follows from it.
        assert all(process.is_running() for process in family[:killed])
    finally:
        for process in family:
            if process.is_running():
                process.kill()
        replica.communicate()


def test_nothing_is_left_in_shared_memory_where_nobody_is_left_to_remove_it(tmp_path: Path) -> None:
    file = tmp_path / "replica.py"
    file.write_text(_SHARING)
    replica = subprocess.Popen([sys.executable, str(file)], stdout=subprocess.PIPE, text=True)
    assert replica.stdout is not None
    memory = Path("/dev/shm", replica.stdout.readline().strip())
    family = psutil.Process(replica.pid).children(recursive=True)
    try:
        assert memory.is_file()
        replica.kill()
        replica.communicate()
        psutil.wait_procs(family, timeout=10)
        assert not memory.exists()
    finally:
        for process in family:
            if process.is_running():
                process.kill()
        memory.unlink(missing_ok=True)
