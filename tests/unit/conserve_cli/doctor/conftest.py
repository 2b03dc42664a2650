"""Fixtures of the doctor's tests."""

import pytest

from tests.nvml.standin import Machine
from tests.unit.conserve_cli.doctor.here import CUDA, GIB, Here


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Here:
    """A machine without GPUs, on which all is well."""
    return Here(monkeypatch)


@pytest.fixture
def h100(machine: Machine, here: Here) -> Machine:
    """One idle H100 with a driver that is new enough, and vLLM's build for it."""
    machine.keep_gpus(1)
    machine.have_driver("580.95.05", (13, 0))
    machine.gpus[0].be_an_h100()
    machine.gpus[0].used_bytes = GIB
    here.packages = {**CUDA}
    return machine
