"""The plugin that has a GPU worker wait for its predecessor's memory."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.worker import gpu_worker, utils

from deployments.engine import gpu_worker as waiting
from tests.nvml.standin import Machine

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
