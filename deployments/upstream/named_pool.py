"""Has engines on CPUs and their node's LMCache server share memory that is not in /dev/shm.

Both map the server's pool of KV: the server says where a chunk is, and the engine copies. LMCache
0.5.6 makes it there. Where /dev/shm is small, as in containers, it pickles and sends KV instead,
while the engine's step waits. If the server is killed with its process group, the pool stays.
"""

import math
from types import SimpleNamespace

from deployments.upstream.patch import Patch, of
from deployments.upstream.unnamed_memory import UnnamedMemory, reserve

_PREFIX = "lmcache_l1_pool_"


def offer() -> str:
    """Make this LMCache server's pool without a name; return what LMCache calls it."""
    from lmcache.v1.multiprocess import server
    from lmcache.v1.platform.torch_ops import mem_alloc

    mem_alloc.shared_memory = SimpleNamespace(SharedMemory=KVPool)
    # LMCache does not share memory if /dev/shm is too small for it.
    server.shutil = SimpleNamespace(disk_usage=lambda _: SimpleNamespace(free=math.inf))
    _, _, pid, _, file = reserve().split("/")
    return f"{_PREFIX}{pid}-{file}"


def apply() -> None:
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


PATCH = Patch(
    name="named_pool",
    seams=(
        *of("lmcache.v1.platform.torch_ops.mem_alloc", "shared_memory alloc_shm_pinned_ptr"),
        "lmcache.v1.multiprocess.server:shutil",
        *of("lmcache.v1.multiprocess.transfer_context.shm", "shared_memory unregister"),
    ),
    why="in containers with a small /dev/shm each store of a prompt on a CPU delays all turns",
    upstream="not reported: (near: LMCache/LMCache#4197) memfd_create for alloc_shm_pinned_ptr",
    process="connector",
    device="cpu",
)
