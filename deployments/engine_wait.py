"""How a CPU engine's processes wait for each other: asleep, not spinning.

A vLLM engine on a CPU is two processes that hand each other every step through shared memory. Each
waits by calling ``sched_yield`` in a loop for up to a second. On a GPU the cores are free for that.
Where the model itself runs on the cores, the loop takes them from it; and a Linux kernel that
counts every yield as time used (6.18 does) then leaves other processes, the router among them,
without a core for seconds. A sleep of a few microseconds costs a step little and ends both.

vLLM loads this in each of its processes, as a plugin of the group ``vllm.general_plugins`` (see
pyproject.toml). ``VLLM_PLUGINS`` in the environment chooses among plugins, and so can leave it out.
"""

import time

# The kernel adds its timer slack, 50 microseconds, to it.
_NAP_S = 50e-6


def register() -> None:
    """Have this process wait asleep, if its engine runs on a CPU. May be called repeatedly."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.distributed.device_communicators import shm_broadcast

    if not hasattr(shm_broadcast, "sched_yield"):
        raise RuntimeError(
            "this vLLM waits in another way; adapt deployments/engine_wait.py to it, or leave the "
            "plugin out with VLLM_PLUGINS="
        )
    shm_broadcast.sched_yield = _nap


def _nap() -> None:
    time.sleep(_NAP_S)
