"""Which GPU a worker runs on: the one that CUDA uses, under NVML's name."""

from types import SimpleNamespace

import pytest
import torch

from deployments.engine.gpu_worker import GpuWorker

BARE = "3a4bd4a5-6d5b-4f2c-9d7d-1a1b0e8f2c11"


@pytest.mark.parametrize("said", [BARE, f"GPU-{BARE}"])
def test_a_worker_names_its_own_gpu(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one of another index: vLLM's, CUDA's and NVML's differ on machines with several."""
    devices = {"cuda:3": SimpleNamespace(uuid=said)}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: devices[str(device)])
    worker = GpuWorker()
    worker.device = torch.device("cuda", 3)
    assert worker.conserve_gpu_uuid() == f"GPU-{BARE}"
