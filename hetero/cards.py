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

    A process sees one MIG device, and then no whole GPU: the first one here, unless UUIDs name
    others, of which Ray gives each worker one.
    """
    found: list[tuple[int | None, str, Card]] = []
    first_part = ""
    try:
        with Nvml() as nvml:
            for gpu in nvml.inventory():
                found += _parts(gpu, nvml.memory_used_bytes(gpu.uuid))
                if gpu.mig_devices:
                    first_part = first_part or gpu.mig_devices[0].uuid
    except NvmlError as error:
        logger.info("GPUs cannot be looked at: %s", error)
        return ()
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is None:
        chosen = [one for one in found if one[0] is not None]
    else:
        names = [name.strip() for name in shown.split(",") if name.strip()]
        chosen = [
            one
            for one in found
            if any(name == str(one[0]) or one[1].startswith(name) for name in names)
        ]
        if not any(name.isdecimal() for name in names):
            first_part = ""
    parts = [card for _, uuid, card in chosen if uuid == first_part]
    return tuple(parts or (card for _, _, card in chosen))


def _parts(gpu: Gpu, used_bytes: int) -> list[tuple[int | None, str, Card]]:
    if not gpu.mig_enabled:
        return [(gpu.index, gpu.uuid, Card(gpu.name, gpu.memory_bytes, used_bytes))]
    return [
        (None if number else gpu.index, part.uuid, Card(part.name, part.memory_bytes))
        for number, part in enumerate(gpu.mig_devices)
    ]
