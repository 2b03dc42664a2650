"""An engine's processes end with the one that started them.

vLLM's core is a process that its replica starts, and that ends when the replica says so. If the
replica is killed, Ray's node manager kills what it left. If that is killed too, or the whole of Ray
is stopped, the core goes on for ever: without anybody to ask it, and with its GPU's memory.

vLLM loads this in each of its processes, as a plugin of the group ``vllm.general_plugins`` (see
pyproject.toml). ``VLLM_PLUGINS`` in the environment chooses among plugins, and so can leave it out.
"""

import logging
import multiprocessing
import os
import threading

from conserve.shared_memory import mapped, remove

logger = logging.getLogger("vllm.conserve")

_armed = False


def register() -> None:
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
    # Whoever else would remove what this engine has in shared memory may be gone as well: after a
    # kill of Ray's own processes, say. The engine's that still live keep what they have.
    try:
        remove(mapped([os.getpid()]))
    except OSError as error:
        logger.warning("what it has in shared memory stays: %s", error)
    # An orderly end would wait for those that are gone, and store what is half computed.
    os._exit(1)
