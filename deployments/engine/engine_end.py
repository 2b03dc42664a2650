"""Leaves nothing of an engine behind, however its processes end.

If an engine's replica and Ray are both killed, vLLM's core would run on for ever, with its GPU's
memory. So each process ends with the one that started it, and has LMCache's server unmap its
memory.

vLLM's processes pass messages through POSIX shared memory, up to 400 MB for each engine. Without a
name it is freed with the last of them. This replaces ``multiprocessing.shared_memory`` in vLLM
0.29.0's ``shm_broadcast``: check it when the version changes.

vLLM loads this in each of its processes, as a plugin of the group ``vllm.general_plugins`` (see
pyproject.toml; ``VLLM_PLUGINS`` chooses among plugins).
"""

import logging
import multiprocessing
import os
import sys
import threading
from types import SimpleNamespace

from deployments.engine.gpu_worker import wait_for_predecessor
from deployments.upstream.unnamed_memory import UnnamedMemory

logger = logging.getLogger("vllm.conserve")

_armed = False


def register() -> None:
    share_without_names()
    wait_for_predecessor()
    end_with_parent()


def share_without_names() -> None:
    """Have this process share memory without a name in /dev/shm."""
    import tqdm
    from vllm.distributed.device_communicators import shm_broadcast

    if not hasattr(shm_broadcast, "shared_memory"):
        logger.warning(
            "this vLLM has no shared_memory to replace, so an engine that is killed may leave "
            "files in /dev/shm; adapt deployments/engine/engine_end.py to this version"
        )
        return
    shm_broadcast.shared_memory = SimpleNamespace(SharedMemory=UnnamedMemory)
    # tqdm's own lock, for bars of several processes, is a semaphore in /dev/shm.
    tqdm.tqdm.set_lock(threading.RLock())


def end_with_parent() -> None:
    """Have this process end when its parent does, if it is a child. May be called repeatedly."""
    global _armed
    parent = multiprocessing.parent_process()
    if parent is None or _armed:
        return
    _armed = True
    threading.Thread(target=_end_with, args=(parent,), name="ends-with-parent", daemon=True).start()


def _end_with(parent: "multiprocessing.process.BaseProcess") -> None:
    # This returns when the parent has ended, however it did.
    parent.join()
    logger.error("process %s, which started this one, has ended: ending too", parent.pid)
    _unmap()
    # An orderly end would wait for processes that are gone, and store half computed KV.
    os._exit(1)


def _unmap() -> None:
    # vLLM loads this module only in processes that have a connector.
    state = sys.modules.get("vllm.distributed.kv_transfer.kv_transfer_state")
    unmap = getattr(getattr(state, "_KV_CONNECTOR_AGENT", None), "unmap", None)
    if unmap is None:
        return
    try:
        unmap()
    except Exception as error:
        logger.warning("LMCache's server was not told that this engine ends: %s", error)
