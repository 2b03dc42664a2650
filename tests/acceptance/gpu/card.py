"""The GPU that these tests run on, or why there is none."""

import importlib.metadata
import json
import logging
import subprocess
import sys
from typing import Any

from hetero.nvml import Gpu, Nvml, NvmlError
from tests.checkout import ROOT

# Each request would be shown beside figures.
logging.getLogger("httpx").setLevel(logging.WARNING)


def missing() -> str:
    """Return why no test can run here; empty: they can."""
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


def printed_by(*arguments: str) -> Any:
    """Return the last line that a Python process prints, which is JSON."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
