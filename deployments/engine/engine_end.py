"""Ends an engine's processes with the one that started them, however that ends.

If an engine's replica and Ray are both killed, vLLM's core would run on for ever, with its GPU's
memory. So each process ends with the one that started it, and has LMCache's server unmap its
memory.

vLLM loads this in each of its processes, as a plugin of the group ``vllm.general_plugins`` (see
pyproject.toml; ``VLLM_PLUGINS`` chooses among plugins).
"""

import logging
import multiprocessing
import os
import sys
import threading

logger = logging.getLogger("vllm.conserve")

_armed = False


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
