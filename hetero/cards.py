"""Looks at the GPUs that engines may use on this machine, and waits for memory on them."""

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from hetero.nvml import Gpu, Nvml, NvmlError

logger = logging.getLogger("conserve.gpus")

_LOOKS_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU or MIG device that engines may run on; ``used_bytes`` counts every process's memory."""

    name: str
    memory_bytes: int
    used_bytes: int = 0


def cards_here() -> tuple[Card, ...]:
    """Return the GPUs that CUDA is shown (``CUDA_VISIBLE_DEVICES``); none without a driver."""
    found: list[tuple[int | None, str, Card]] = []
    try:
        with Nvml() as nvml:
            for gpu in nvml.inventory():
                found += _parts(gpu, nvml.memory_used_bytes(gpu.uuid))
    except NvmlError as error:
        logger.info("GPUs cannot be looked at: %s", error)
        return ()
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is None:
        return tuple(card for _, _, card in found)
    names = [name.strip() for name in shown.split(",") if name.strip()]
    return tuple(
        card
        for index, uuid, card in found
        if any(name == str(index) or uuid.startswith(name) for name in names)
    )


def _parts(gpu: Gpu, used_bytes: int) -> list[tuple[int | None, str, Card]]:
    if not gpu.mig_enabled:
        return [(gpu.index, gpu.uuid, Card(gpu.name, gpu.memory_bytes, used_bytes))]
    return [(None, part.uuid, Card(part.name, part.memory_bytes)) for part in gpu.mig_devices]


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
        clock() - started_s, _gib(needed_bytes), "" if enough else ": too little",
    )  # fmt: skip
    return enough


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"
