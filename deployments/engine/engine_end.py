"""An engine's processes end with the one that started them.

vLLM's core is a process that its replica starts, and that ends when the replica says so. If the
replica is killed, Ray's node manager kills what it left. If that is killed too, or the whole of Ray
is stopped, the core goes on for ever: without anybody to ask it, and with its GPU's memory.
What they had in shared memory goes with them: see `engine_memory`. LMCache's server is told to let
go of what it has mapped of a GPU's memory.

vLLM loads this in each of its processes, as a plugin of the group ``vllm.general_plugins`` (see
pyproject.toml). ``VLLM_PLUGINS`` in the environment chooses among plugins, and so can leave it out.
"""

import logging
import multiprocessing
import os
import sys
import threading

from deployments.engine import engine_memory, gpu_memory

logger = logging.getLogger("vllm.conserve")

_armed = False


def register() -> None:
    """Have nothing stay of this process when its engine ends, and its successor wait for that.

    May be called repeatedly.
    """
    engine_memory.register()
    gpu_memory.register()
    end_with_parent()


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
    logger.error("process %s, which started this one, is gone: ending", parent.pid)
    _let_go()
    # An orderly end would wait for those that are gone, and store what is half computed.
    os._exit(1)


def _let_go() -> None:
    # Loaded only where there is a connector; in other processes there is nothing to let go of.
    state = sys.modules.get("vllm.distributed.kv_transfer.kv_transfer_state")
    connector = getattr(state, "_KV_CONNECTOR_AGENT", None)
    if connector is None or not hasattr(connector, "let_go"):
        return
    try:
        connector.let_go()
    except Exception as error:
        logger.warning("LMCache's server was not told that this engine ends: %s", error)
