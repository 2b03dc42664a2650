"""The memory that an engine's processes talk through, without a name in /dev/shm.

vLLM's processes pass messages through POSIX shared memory, up to 400 MB for each engine. It has a
name, which only they remove: where all of them are killed, by Ray as it ends for instance, the
memory stays taken until the machine starts again. Memory that never had a name goes with the last
process that uses it, however that ends. Nor does it count against the size of /dev/shm, which
containers keep small.

vLLM loads this in each of its processes, with the plugin in `engine_end`, before it makes or opens
any. What it takes the place of is ``multiprocessing.shared_memory`` in vLLM 0.29.0's
``shm_broadcast``: check it when that version changes.
"""

import logging
import mmap
import os
import threading
from types import SimpleNamespace

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
            "/dev/shm; deployments/engine/unnamed_memory.py has to be adapted to it"
        )
        return
    shm_broadcast.shared_memory = SimpleNamespace(SharedMemory=UnnamedMemory)
    # Its own lock, for bars of several processes, is a semaphore in /dev/shm.
    tqdm.tqdm.set_lock(threading.RLock())


class UnnamedMemory:
    """In the place of ``multiprocessing.shared_memory.SharedMemory``, as vLLM uses that.

    Args:
        name: of memory that a living process on this machine has made and not closed.
        create: make new memory instead, all zeros.
        size: of new memory, in bytes.

    Raises:
        FileNotFoundError: no process here has memory of this name.
    """

    def __init__(self, name: str | None = None, create: bool = False, size: int = 0) -> None:
        self._file: int | None = None
        if create:
            # Open for as long as somebody may come by its name.
            self._file = file = os.memfd_create("conserve", os.MFD_CLOEXEC)
            os.ftruncate(file, size)
            self.name = f"/proc/{os.getpid()}/fd/{file}"
        else:
            assert name is not None
            self.name = name
            file = os.open(name, os.O_RDWR | os.O_CLOEXEC)
        try:
            self.size = os.fstat(file).st_size
            self._map = mmap.mmap(file, self.size)
        finally:
            if not create:
                os.close(file)
        self.buf: memoryview | None = memoryview(self._map)

    def close(self) -> None:
        """Give it up; others keep it for as long as they have it open. May be called repeatedly."""
        if self.buf is not None:
            self.buf.release()
            self.buf = None
            self._map.close()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def unlink(self) -> None:
        """There is no name to remove."""
