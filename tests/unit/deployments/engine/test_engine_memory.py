"""Memory that an engine's processes share is in no folder."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from deployments.engine import engine_end

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
