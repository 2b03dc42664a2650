"""Has vLLM's processes share memory without a name in /dev/shm.

They pass messages through POSIX shared memory, up to 400 MB for each engine. If all of them are
killed it stays, and containers have 64 MB for it, with which vLLM refuses to start. Without a name
it is freed with the last of them, and only the container's own limit of memory counts.
"""

import threading
from types import SimpleNamespace

from deployments.upstream.patch import Patch, of
from deployments.upstream.unnamed_memory import UnnamedMemory


def apply() -> None:
    import tqdm
    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.shared_memory = SimpleNamespace(SharedMemory=UnnamedMemory)
    usual, fits = shm_broadcast.check_shm_free_space, shm_broadcast.check_cgroup_memory_available
    # Others, whose memory has a name, give more than the size.
    shm_broadcast.check_shm_free_space = lambda size, *more, **named: (
        usual(size, *more, **named) if more or named else fits(size, "shared memory")
    )
    # tqdm's own lock, for bars of several processes, is a semaphore in /dev/shm.
    tqdm.tqdm.set_lock(threading.RLock())


PATCH = Patch(
    name="named_shared_memory",
    seams=(
        *of(
            "vllm.distributed.device_communicators.shm_broadcast",
            "shared_memory.SharedMemory ShmRingBuffer.__init__ check_shm_free_space "
            "check_cgroup_memory_available",
        ),
    ),
    why="an engine that is killed leaves up to 400 MB in /dev/shm, which then fills up; and no "
    "engine starts on a GPU in a container with the usual 64 MB there",
    upstream="not reported: ShmRingBuffer could use memfd_create, and /proc/<pid>/fd/<n> as name",
    process="engine",
)
