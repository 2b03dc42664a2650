"""Which GPU a worker runs on, under NVML's name, and how it waits for that GPU's memory."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.worker import gpu_worker, utils

from deployments.engine import gpu_worker as waiting
from deployments.engine.gpu_worker import GpuWorker, nvml_name
from hetero.nvml import Gpu, MigDevice, Nvml
from tests.nvml.standin import NO_MIG, Machine

BARE = "3a4bd4a5-6d5b-4f2c-9d7d-1a1b0e8f2c11"


@pytest.mark.parametrize("said", [BARE, f"GPU-{BARE}"])
def test_a_worker_names_its_own_gpu(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one of another index: vLLM's, CUDA's and NVML's differ on machines with several."""
    devices = {"cuda:3": SimpleNamespace(uuid=said)}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: devices[str(device)])
    worker = GpuWorker()
    worker.device = torch.device("cuda", 3)
    assert worker.conserve_gpu_uuid() == f"GPU-{BARE}"


PART = "5e0c3a52-7f5c-5f3e-8a5b-0f5d0b1c9a77"


def test_a_part_of_a_gpu_has_its_own_name() -> None:
    """By a whole GPU's prefix NVML knows no MIG device, so that none would be metered."""
    part = MigDevice(f"MIG-{PART}", "NVIDIA H100 MIG 3g.40gb", 60, 40 << 30)
    gpu = Gpu(0, f"GPU-{BARE}", "NVIDIA H100", 80 << 30, 132, (9, 0), True, (part,))
    assert nvml_name(PART, [gpu]) == f"MIG-{PART}"
    assert nvml_name(BARE, [gpu]) == f"GPU-{BARE}"
    assert nvml_name(f"MIG-{PART}", [gpu]) == f"MIG-{PART}"


def test_a_worker_names_its_part_as_the_driver_does(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = machine.gpus[0]
    first.unsupported &= ~NO_MIG
    first.mig_enabled, first.mig_devices, first.mig_sms = 1, 2, 14
    with Nvml() as nvml:
        parts = [part.uuid for part in nvml.inventory()[0].mig_devices]
    said = SimpleNamespace(uuid=parts[1].removeprefix("MIG-"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: said)
    worker = GpuWorker()
    worker.device = torch.device("cuda", 0)
    assert worker.conserve_gpu_uuid() == parts[1]


GIB = 1 << 30


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker of vLLM's on the first of the machine's GPUs; what is replaced comes back."""
    monkeypatch.setattr(utils, "request_memory", utils.request_memory)
    monkeypatch.setattr(gpu_worker, "request_memory", utils.request_memory)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda _: True)
    bare = "00000000-0000-0000-0000-000000000000"
    properties = SimpleNamespace(uuid=bare)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


class Snapshot:
    """VLLM's look at a GPU's memory, as CUDA has it: what the stand-in shows to NVML."""

    device_ = torch.device("cuda", 0)

    def __init__(self, machine: Machine) -> None:
        self._gpu = machine.gpus[0]
        self.measure()

    def measure(self) -> None:
        self.total_memory = int(self._gpu.memory_bytes)
        self.free_memory = int(self._gpu.memory_bytes - self._gpu.used_bytes)


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("freed", [True, False])
def test_a_worker_takes_the_memory_that_its_predecessor_gives_back(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, freed: bool
) -> None:
    gpu = machine.gpus[0]
    gpu.used_bytes = 40 * GIB
    waited: list[float] = []

    def wait(nvml: Any, uuid: str, needed_bytes: int, timeout_s: float) -> bool:
        assert (uuid, needed_bytes) == (gpu.id, 24 * GIB)
        assert nvml.memory_free_bytes(uuid) == 8 * GIB
        waited.append(timeout_s)
        if freed:
            gpu.used_bytes = GIB
        return freed

    monkeypatch.setattr(waiting, "wait_for_memory", wait)
    waiting.wait_for_predecessor()
    waiting.wait_for_predecessor()
    wanted = SimpleNamespace(gpu_memory_utilization=0.5)
    if freed:
        assert gpu_worker.request_memory(Snapshot(machine), wanted) == 24 * GIB
        # There is room now.
        assert gpu_worker.request_memory(Snapshot(machine), wanted) == 24 * GIB
    else:
        with pytest.raises(ValueError, match="Free memory on device"):
            gpu_worker.request_memory(Snapshot(machine), wanted)
    # As long as LMCache's server takes to miss an engine, and its default is four times that.
    assert len(waited) == 1
    assert 37.5 < waited[0] < 120


@pytest.mark.usefixtures("on_a_gpu")
def test_where_there_is_no_nvml_vllm_decides_at_once(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    machine.gpus[0].used_bytes = 40 * GIB
    machine.fail_to_open(9)
    waiting.wait_for_predecessor()
    with pytest.raises(ValueError, match="Free memory on device"):
        gpu_worker.request_memory(Snapshot(machine), SimpleNamespace(gpu_memory_utilization=0.5))
    assert "not waiting for the GPU's memory" in caplog.text


def test_an_engine_on_a_cpu_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    before = utils.request_memory
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda _: False)
    waiting.wait_for_predecessor()
    assert utils.request_memory is before


@pytest.mark.usefixtures("on_a_gpu")
def test_an_unknown_vllm_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.delattr(utils, "request_memory")
    waiting.wait_for_predecessor()
    assert Path(waiting.__file__).name in caplog.text
