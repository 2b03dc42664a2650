"""Which GPU a worker runs on, under NVML's name."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

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


def test_an_engine_that_shares_a_gpu_keeps_to_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less what is not PyTorch's: its context."""
    card = SimpleNamespace(total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    limits: dict[Any, float] = {}
    reserved = [18 << 30]
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda gpu: reserved[0])
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda part, gpu: limits.update({gpu: part})
    )
    worker = GpuWorker()
    worker.device = torch.device("cuda", 1)
    cache = SimpleNamespace(gpu_memory_utilization=0.25)
    worker.vllm_config = SimpleNamespace(cache_config=cache)
    worker.conserve_keep_to_part()
    assert limits.pop(worker.device) == pytest.approx(19 / 80)
    reserved[0] = 20 << 30
    worker.conserve_keep_to_part()
    assert not limits


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
