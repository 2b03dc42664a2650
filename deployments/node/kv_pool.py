"""Lets engines on CPUs copy KV to and from their node's LMCache server's memory themselves.

By default LMCache pickles and sends KV, while the engine's step waits. Here both map the same
memory: the server says where a chunk is, and the engine copies.

It replaces internals of lmcache 0.5.6 (what ``torch_ops.mem_alloc``, ``multiprocess.server`` and
``transfer_context.shm`` import, and the prefix of a pool's name). Check it when that version
changes.
"""

import math
from types import SimpleNamespace

from deployments.upstream.unnamed_memory import UnnamedMemory, reserve

_PREFIX = "lmcache_l1_pool_"


def offer() -> str:
    """Make this LMCache server's pool without a name; return what LMCache calls it."""
    from lmcache.v1.multiprocess import server
    from lmcache.v1.platform.torch_ops import mem_alloc

    mem_alloc.shared_memory = SimpleNamespace(SharedMemory=KVPool)
    # LMCache does not share memory if /dev/shm is too small, as in containers; this is not in it.
    server.shutil = SimpleNamespace(disk_usage=lambda _: SimpleNamespace(free=math.inf))
    _, _, pid, _, file = reserve().split("/")
    return f"{_PREFIX}{pid}-{file}"


def accept() -> None:
    """Have this engine's worker find the pool."""
    from lmcache.v1.multiprocess.transfer_context import shm

    shm.shared_memory = SimpleNamespace(SharedMemory=KVPool)
    # Python does not track this memory, so it must not unregister it.
    shm.unregister = lambda name, kind: None


class KVPool(UnnamedMemory):
    """Replaces ``multiprocessing.shared_memory.SharedMemory`` in LMCache.

    ``name`` is from `offer`, in a live process; raises `FileNotFoundError` if it has no pool yet.
    """

    def __init__(self, name: str, create: bool = False, size: int = 0) -> None:
        pid, _, file = name.removeprefix(_PREFIX).partition("-")
        super().__init__(f"/proc/{pid}/fd/{file}", create, size)
