"""Memory that processes on a machine share, without a name in /dev/shm.

POSIX shared memory has a name that only its makers remove: where all of them are killed, it stays
taken until the machine starts again. Memory that never had a name goes with the last process that
uses it, however that ends. Nor does it count against the size of /dev/shm, which containers keep
small.
"""

import mmap
import os


def reserve() -> str:
    """A name for memory that this process is going to make; it is this process's until it ends."""
    return f"/proc/{os.getpid()}/fd/{os.memfd_create('conserve', os.MFD_CLOEXEC)}"


class UnnamedMemory:
    """In the place of ``multiprocessing.shared_memory.SharedMemory``, as vLLM and LMCache use that.

    Args:
        name: of memory that a living process on this machine has made, or reserved, and not closed.
        create: make new memory, all zeros: of this name, which was reserved, or of one of its own.
        size: of new memory, in bytes.

    Raises:
        FileNotFoundError: no process here has memory of this name.
    """

    def __init__(self, name: str | None = None, create: bool = False, size: int = 0) -> None:
        self._file: int | None = None
        if name is None:
            assert create
            name = reserve()
            # Open for as long as somebody may come by its name.
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
