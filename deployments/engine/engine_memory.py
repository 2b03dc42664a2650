"""The memory that an engine's processes talk through, without a name in /dev/shm.

vLLM's processes pass messages through POSIX shared memory, up to 400 MB for each engine, which
would stay behind where all of them are killed, by Ray as it ends for instance.

vLLM loads this in each of its processes, with the plugin in `engine_end`, before it makes or opens
any. What it takes the place of is ``multiprocessing.shared_memory`` in vLLM 0.29.0's
``shm_broadcast``: check it when that version changes.
"""

import logging
import threading
from types import SimpleNamespace

from deployments.node.unnamed_memory import UnnamedMemory

logger = logging.getLogger("vllm.conserve")


def register() -> None:
    """Have this process make and open such memory. May be called repeatedly.

    A vLLM that shares memory in another way is left as it is, with a warning.
    """
    import tqdm
    from vllm.distributed.device_communicators import shm_broadcast

    if not hasattr(shm_broadcast, "shared_memory"):
        logger.warning(
            "this vLLM has no shared_memory to replace: what its processes share may stay in "
            "/dev/shm; deployments/engine/engine_memory.py has to be adapted to it"
        )
        return
    shm_broadcast.shared_memory = SimpleNamespace(SharedMemory=UnnamedMemory)
    # Its own lock, for bars of several processes, is a semaphore in /dev/shm.
    tqdm.tqdm.set_lock(threading.RLock())
