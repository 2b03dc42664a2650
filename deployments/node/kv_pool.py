"""Finds where an LMCache server keeps KV, so that engines of its node copy it themselves.

An engine on a CPU has no device memory that the server could copy from or to. As it comes, LMCache
then has KV pickled by one process, sent, and unpickled by the other, while the engine's step waits.
Here both map the same memory: the server says where in it a chunk is, and the engine copies. The
memory has no name in /dev/shm, and goes with the last process that has it mapped.

It reaches into internals of lmcache 0.5.6 (what ``torch_ops.mem_alloc``, ``multiprocess.server``
and ``transfer_context.shm`` import, and the prefix that a pool's name has to have): check it when
that version changes.
"""

import math
from types import SimpleNamespace

from deployments.node.unnamed_memory import UnnamedMemory, reserve

_PREFIX = "lmcache_l1_pool_"


def offer() -> str:
    """Have this process, an LMCache server, make its pool so; returns the pool's name for it."""
    from lmcache.v1.multiprocess import server
    from lmcache.v1.platform.torch_ops import mem_alloc

    mem_alloc.shared_memory = SimpleNamespace(SharedMemory=KVPool)
    # It shares nothing where /dev/shm is too small for it, as in containers; this is not there.
    server.shutil = SimpleNamespace(disk_usage=lambda _: SimpleNamespace(free=math.inf))
    _, _, pid, _, file = reserve().split("/")
    return f"{_PREFIX}{pid}-{file}"


def accept() -> None:
    """Have this process, an engine's worker, find the pool by that name."""
    from lmcache.v1.multiprocess.transfer_context import shm

    shm.shared_memory = SimpleNamespace(SharedMemory=KVPool)
    # Python has not heard of this memory.
    shm.unregister = lambda name, kind: None


class KVPool(UnnamedMemory):
    """In the place of ``multiprocessing.shared_memory.SharedMemory``, as LMCache uses that.

    Args:
        name: what `offer` returned, in a process that lives.
        create, size: as for `UnnamedMemory`.

    Raises:
        FileNotFoundError: there is no pool of this name, or it was not made yet.
    """

    def __init__(self, name: str, create: bool = False, size: int = 0) -> None:
        pid, _, file = name.removeprefix(_PREFIX).partition("-")
        super().__init__(f"/proc/{pid}/fd/{file}", create, size)
