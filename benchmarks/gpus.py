"""What NVIDIA's driver says of this machine's GPUs: their names, and the energy they have used."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pynvml


def names() -> list[str]:
    """The models of this machine's GPUs; empty without an NVIDIA driver."""
    with _devices() as devices:
        return [str(pynvml.nvmlDeviceGetName(device)) for device in devices]


def energy_j() -> float | None:
    """What all GPUs of this machine have used since their driver was loaded, in joules.

    None without an NVIDIA driver, or where a GPU does not count it (those before Volta).

    Raises:
        pynvml.NVMLError: the driver fails in another way.
    """
    with _devices() as devices:
        try:
            used_mj = [pynvml.nvmlDeviceGetTotalEnergyConsumption(device) for device in devices]
        except pynvml.NVMLError_NotSupported:
            return None
    return sum(used_mj) / 1e3 if used_mj else None


@contextmanager
def _devices() -> Iterator[list[Any]]:
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        yield []
        return
    try:
        count = pynvml.nvmlDeviceGetCount()
        yield [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
    finally:
        pynvml.nvmlShutdown()
