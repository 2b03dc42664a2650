"""The GPU that these tests run on, or why there is none."""

import importlib.metadata
import logging

import pytest

from hetero.nvml import Gpu, Nvml, NvmlError

# Shown as tests run (`make test-gpu`): what is measured is printed, and not asserted.
seen = logging.getLogger("tests.gpu")
# Each request would be, too.
logging.getLogger("httpx").setLevel(logging.WARNING)


def _missing() -> str:
    try:
        with Nvml() as nvml:
            if not nvml.inventory():
                return "no NVIDIA GPU answers here"
    except NvmlError:
        return "no NVIDIA GPU here"
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return "vLLM's CUDA build is not installed (make install-gpu)"
    return ""


_MISSING = _missing()
NEEDS_GPU = pytest.mark.skipif(bool(_MISSING), reason=_MISSING)


def card() -> Gpu:
    """The first GPU, on which Ray puts what asks for one."""
    with Nvml() as nvml:
        return nvml.inventory()[0]


def used_bytes() -> int:
    """Its memory that is taken now, by whomever."""
    with Nvml() as nvml:
        return nvml.memory_used_bytes(nvml.inventory()[0].uuid)


def energy_j() -> float:
    """What it has used since the driver was loaded."""
    with Nvml() as nvml:
        return nvml.energy_j(nvml.inventory()[0].uuid)
