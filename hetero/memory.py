"""Waits for room on a GPU that a dead engine's memory may still take."""

import logging
import time
from collections.abc import Callable

from hetero.nvml import Nvml

logger = logging.getLogger("conserve.memory")

_LOOKS_EVERY_S = 0.5


def wait_for_memory(
    nvml: Nvml,
    uuid: str,
    needed_bytes: int,
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Wait until so much of a GPU's memory is free, log the wait, and return whether it is.

    A dead engine's memory stays taken while LMCache's server has its KV space mapped, though no
    process on the GPU accounts for it. Raises `NvmlError` if the GPU cannot be asked.
    """
    started_s = clock()
    free_bytes = nvml.memory_free_bytes(uuid)
    if free_bytes >= needed_bytes:
        return True
    held = ", ".join(
        f"{process.pid}" + (f" ({_gib(process.memory_bytes)})" if process.memory_bytes else "")
        for process in nvml.processes(uuid)
    )
    logger.warning(
        "%s: %s is free of %s needed; waiting for up to %g s, until LMCache's server lets go of an "
        "engine that was here (processes on this GPU: %s)", uuid, _gib(free_bytes),
        _gib(needed_bytes), timeout_s, held or "none",
    )  # fmt: skip
    while free_bytes < needed_bytes and clock() - started_s < timeout_s:
        sleep(_LOOKS_EVERY_S)
        free_bytes = nvml.memory_free_bytes(uuid)
    enough = free_bytes >= needed_bytes
    logger.warning(
        "%s: %s is free after %.0f s, of %s needed%s", uuid, _gib(free_bytes),
        clock() - started_s, _gib(needed_bytes), "" if enough else ": that will not do",
    )  # fmt: skip
    return enough


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"
