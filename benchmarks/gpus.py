"""Asks NVIDIA's driver of this machine's GPUs: their names, and the energy they have used."""

from hetero.nvml import GpuLost, NoDriver, NotSupported, Nvml


def names() -> list[str]:
    """The models of this machine's GPUs; empty without an NVIDIA driver."""
    try:
        with Nvml() as nvml:
            return [gpu.name for gpu in nvml.inventory()]
    except NoDriver:
        return []


def energy_j() -> float | None:
    """Return what all GPUs of this machine have used since their driver was loaded, in joules.

    None without an NVIDIA driver, or where a GPU does not count it (those before Volta).

    Raises:
        hetero.nvml.NvmlError: the driver fails in another way.
    """
    try:
        with Nvml() as nvml:
            if lost := nvml.lost():
                raise GpuLost(f"GPUs {lost} do not answer: the energy of this machine is not known")
            used_j = [nvml.energy_j(gpu.uuid) for gpu in nvml.inventory()]
    except (NoDriver, NotSupported):
        return None
    return sum(used_j) if used_j else None
