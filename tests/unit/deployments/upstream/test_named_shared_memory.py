"""Memory that vLLM's processes share, in /dev/shm and in no folder."""

import subprocess
import sys

import pytest

_SIZE = 100_000
_PATCH = """
from deployments.upstream import named_shared_memory
named_shared_memory.apply()
"""
# vLLM's own buffer in another process, opened as its workers open it.
_READER = f"""
import sys
from vllm.distributed.device_communicators.shm_broadcast import ShmRingBuffer
buffer = ShmRingBuffer(1, {_SIZE}, 2, sys.argv[1])
with buffer.get_data(1) as data:
    data[:5] = bytes(reversed(data[:5]))
"""
_WRITER = f"""
import os, subprocess, sys
from types import SimpleNamespace
from conserve.launch import shared_memory_of
from vllm.distributed.device_communicators import shm_broadcast
from vllm.distributed.device_communicators.shm_broadcast import ShmRingBuffer
shm_broadcast.shutil.disk_usage = lambda _: SimpleNamespace(free=int(sys.argv[2]))
buffer = ShmRingBuffer(1, {_SIZE}, 2)
with buffer.get_data(1) as data:
    data[:5] = b"token"
subprocess.run([sys.executable, "-c", sys.argv[1], buffer.handle()[3]], check=True)
with buffer.get_data(1) as data:
    print(bytes(data[:5]).decode(), len(shared_memory_of([os.getpid()])))
"""


def written_and_named(patch: str, free_bytes: int = 10 * _SIZE) -> list[str]:
    """Return what one process wrote and another read, and how many names this has in /dev/shm."""
    command = [sys.executable, "-c", patch + _WRITER, patch + _READER, str(free_bytes)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout, done.stderr
    return done.stdout.split()


def test_what_vllm_shares_has_a_name() -> None:
    assert written_and_named("") == ["nekot", "1"]
    with pytest.raises(AssertionError, match="Insufficient space in /dev/shm"):
        written_and_named("", free_bytes=_SIZE)


def test_what_patched_vllm_shares_is_in_no_folder() -> None:
    assert written_and_named(_PATCH, free_bytes=_SIZE) == ["nekot", "0"]
