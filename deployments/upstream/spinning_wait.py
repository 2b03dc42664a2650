"""Has processes of an engine wait for each other asleep where CPUs are short.

Several workers of a vLLM engine hand each other every step through shared memory. Each waits in a
loop of ``sched_yield`` for up to a second, which takes cores from the model. Under Linux 6.18 it
kept other processes from any core for up to 11 seconds; with sleeps of microseconds no wait was
longer than 0.3 seconds. On a GPU's node with fewer CPUs than such processes they sleep, too.
"""

import os
import time

from deployments.upstream.patch import Patch
from hetero.container import usable_cpus

# Says how many processes may wait at a time on a node, for engines on GPUs.
WAITING = "CONSERVE_WAITING_PROCESSES"
# The kernel adds its timer slack, 50 microseconds, to it.
_NAP_S = 50e-6


def apply() -> None:
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.platforms import current_platform

    if current_platform.is_cpu() or int(os.environ.get(WAITING, "0")) > usable_cpus():
        shm_broadcast.sched_yield = lambda: time.sleep(_NAP_S)


PATCH = Patch(
    name="spinning_wait",
    seams=("vllm.distributed.device_communicators.shm_broadcast:sched_yield",),
    why="processes that wait for each other take the cores that the model computes on",
    upstream="vllm#19036, vllm PR #52814 (VLLM_SHM_BROADCAST_BUSY_LOOP_S)",
    process="engine",
    ends="a variable of vLLM's bounds how long SpinCondition spins",
)
