"""A server's KV, as engines on its node find it: LMCache's own code on both sides."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deployments.upstream.named_pool import KVPool

_SIZE = 1 << 20

# An engine's worker, as LMCache has it open the pool and look at a chunk.
_WORKER = """
import sys
from types import SimpleNamespace
from deployments.upstream import named_pool
named_pool.apply()
from lmcache.v1.multiprocess.transfer_context.shm import EngineDrivenContextShm
context = EngineDrivenContextShm(SimpleNamespace(), SimpleNamespace(), 1.0, sys.argv[1], 1 << 20)
chunk = context._make_tensor_view(4096, 5 * 4, [5], "float32")
print(chunk.tolist())
chunk += 1
del chunk
context.close()
"""

# The server, as LMCache has it make the pool.
_SERVER = f"""
import ctypes, os, subprocess, sys
from deployments.upstream import named_pool
before = set(os.listdir("/dev/shm"))
name = named_pool.offer()
from lmcache.v1.platform.torch_ops.mem_alloc import alloc_shm_pinned_ptr
pointer = alloc_shm_pinned_ptr({_SIZE}, name)
chunk = (ctypes.c_float * 5).from_address(pointer + 4096)
chunk[:] = [1, 2, 3, 4, 5]
done = subprocess.run([sys.executable, "-c", {_WORKER!r}, name], capture_output=True, text=True)
in_folder = any(file.startswith("lmcache") for file in set(os.listdir("/dev/shm")) - before)
from lmcache.v1.multiprocess import server
fits = server.shutil.disk_usage("/dev/shm").free > 1 << 60
print(done.stdout.strip(), list(chunk), name, in_folder, fits)
print(done.stderr, file=sys.stderr)
"""


# A server that is killed with its processes, as LMCache alone has it make its pool.
_ALONE = f"""
import os, signal, sys
from lmcache.v1.platform.torch_ops.mem_alloc import alloc_shm_pinned_ptr
alloc_shm_pinned_ptr({_SIZE}, sys.argv[1])
os.killpg(0, signal.SIGKILL)
"""


def test_a_killed_servers_pool_stays(tmp_path: Path) -> None:
    name = f"lmcache_l1_pool_{tmp_path.name}"
    command = [sys.executable, "-c", _ALONE, name]
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    Path("/dev/shm", name).unlink()


def test_a_patched_engine_writes_where_the_server_reads() -> None:
    done = subprocess.run([sys.executable, "-c", _SERVER], capture_output=True, text=True)
    seen, after, name, in_folder, fits = done.stdout.replace(", ", ",").split()
    assert (seen, after) == ("[1.0,2.0,3.0,4.0,5.0]", "[2.0,3.0,4.0,5.0,6.0]"), done.stderr
    # It is nowhere in /dev/shm, and is not kept from being by its size.
    assert (in_folder, fits) == ("False", "True")
    # Nothing complains of memory that it has not heard of.
    assert "Traceback" not in done.stderr
    # And it has gone with its processes.
    with pytest.raises(FileNotFoundError):
        KVPool(name)
