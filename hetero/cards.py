"""Looks at the GPUs that engines may use on this machine."""

import logging
import os
from dataclasses import dataclass

from hetero.nvml import Gpu, Nvml, NvmlError

logger = logging.getLogger("conserve.gpus")


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU or MIG device that engines may run on; ``used_bytes`` counts every process's memory."""

    name: str
    memory_bytes: int
    used_bytes: int = 0


def cards_here() -> tuple[Card, ...]:
    """Return the GPUs that CUDA is shown (``CUDA_VISIBLE_DEVICES``); none without a driver.

    Of a GPU in MIG mode CUDA shows the first device alone, unless others are named by their UUIDs.
    """
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
        return tuple(card for index, _, card in found if index is not None)
    names = [name.strip() for name in shown.split(",") if name.strip()]
    return tuple(
        card
        for index, uuid, card in found
        if any(name == str(index) or uuid.startswith(name) for name in names)
    )


def _parts(gpu: Gpu, used_bytes: int) -> list[tuple[int | None, str, Card]]:
    if not gpu.mig_enabled:
        return [(gpu.index, gpu.uuid, Card(gpu.name, gpu.memory_bytes, used_bytes))]
    return [
        (None if number else gpu.index, part.uuid, Card(part.name, part.memory_bytes))
        for number, part in enumerate(gpu.mig_devices)
    ]
