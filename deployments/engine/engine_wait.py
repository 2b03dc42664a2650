"""Has processes of an engine wait for each other asleep where CPUs are short.

A vLLM engine on a CPU is two processes that hand each other every step through shared memory. Each
waits in a loop of ``sched_yield`` for up to a second, which takes cores from the model. Under Linux
6.18 it kept other processes from any core for up to 11 seconds; with sleeps of microseconds no wait
was longer than 0.3 seconds. On a GPU's node with fewer CPUs than such processes they sleep, too.

vLLM loads this in each of its processes, as a plugin of the group ``vllm.general_plugins`` (see
pyproject.toml; ``VLLM_PLUGINS`` chooses among plugins).
"""

import logging
import os
import time

from hetero.container import usable_cpus

logger = logging.getLogger("vllm.conserve")

# Says how many processes may wait at a time on a node, for engines on GPUs.
WAITING = "CONSERVE_WAITING_PROCESSES"
# The kernel adds its timer slack, 50 microseconds, to it.
_NAP_S = 50e-6


def register() -> None:
    """Have this process wait asleep, if the engine runs on a CPU or more processes than CPUs wait.

    May be called repeatedly.
    """
    from vllm.platforms import current_platform

    if not (current_platform.is_cpu() or _too_many(os.environ.get(WAITING))):
        return
    from vllm.distributed.device_communicators import shm_broadcast

    if not hasattr(shm_broadcast, "sched_yield"):
        logger.warning(
            "this vLLM has no sched_yield to replace, so its processes may take cores while they "
            "wait; adapt deployments/engine/engine_wait.py to this version"
        )
        return
    shm_broadcast.sched_yield = _nap


def _too_many(waiting: str | None) -> bool:
    if waiting is None or int(waiting) <= usable_cpus():
        return False
    logger.info(
        "%s processes may wait for each other here, with %.3g CPUs: they wait asleep", waiting,
        usable_cpus(),
    )  # fmt: skip
    return True


def _nap() -> None:
    time.sleep(_NAP_S)
