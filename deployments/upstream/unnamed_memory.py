"""Shares memory between a machine's processes, without a name in /dev/shm.

It goes with the last process that uses it, where POSIX shared memory outlives processes that were
killed. Nor does it count against the size of /dev/shm, which is small in containers.
"""

import mmap
import os


def reserve() -> str:
    """Return a name for memory that this process will make."""
    return f"/proc/{os.getpid()}/fd/{os.memfd_create('conserve', os.MFD_CLOEXEC)}"


class UnnamedMemory:
    """Replaces ``multiprocessing.shared_memory.SharedMemory`` in vLLM and LMCache.

    ``name`` is of memory that a live process here has made or reserved, else `FileNotFoundError` is
    raised. With ``create``, make new memory of ``size`` bytes.
    """

    def __init__(self, name: str | None = None, create: bool = False, size: int = 0) -> None:
        self._file: int | None = None
        if name is None:
            assert create
            name = reserve()
            # It stays open as long as other processes may use its name.
            self._file = int(name.rpartition("/")[2])
        self.name = name
        file = os.open(name, os.O_RDWR | os.O_CLOEXEC)
        try:
            if create:
                os.ftruncate(file, size)
            self.size = os.fstat(file).st_size
            if not self.size:
                raise FileNotFoundError(f"{name} is reserved, and was not made yet")
            self._map = mmap.mmap(file, self.size)
        finally:
            os.close(file)
        self.buf: memoryview | None = memoryview(self._map)

    def close(self) -> None:
        """Unmap it here; other processes keep it. May be called repeatedly."""
        if self.buf is not None:
            self.buf.release()
            self.buf = None
            self._map.close()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def unlink(self) -> None:
        """Do nothing, as there is no name to remove."""
