"""Kernels that keep scratch space: vLLM's own, and its own manager of such space."""

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.kernels.linear.mixed_precision.machete import MacheteLinearKernel
from vllm.model_executor.kernels.linear.mixed_precision.marlin import MarlinLinearKernel
from vllm.model_executor.kernels.linear.scaled_mm import flashinfer
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.v1.worker import workspace

from conserve_inside.lane.worker import LaneWorking
from conserve_inside.scratch import locking_kernel, shared_scratch


class Quantised(QuantizeMethodBase):
    """A layer's method, which has a kernel as vLLM's have."""

    __module__ = QuantizeMethodBase.__module__

    def __init__(self, kernel: type[Any] | None) -> None:
        self.kernel = None if kernel is None else object.__new__(kernel)

    create_weights = apply = lambda *_: None


def model(kernel: type[Any] | None = None) -> torch.nn.Module:
    linear = torch.nn.Linear(1, 1)
    linear.quant_method = Quantised(kernel)
    return torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Sequential(linear))


@pytest.fixture
def manager() -> Iterator[workspace.WorkspaceManager]:
    workspace.init_workspace_manager(torch.device("cpu"))
    yield workspace.current_workspace_manager()
    workspace.reset_workspace_manager()


def test_kernels_whose_blocks_wait_for_each_other_are_found_in_a_loaded_model() -> None:
    assert locking_kernel(model(MarlinLinearKernel)) == "MarlinLinearKernel"
    assert locking_kernel(model(MacheteLinearKernel)) is None
    kernel = flashinfer.FlashInferFP8ScaledMMLinearKernel
    assert "FlashInfer" in (shared_scratch(model(kernel)) or "")
    found = model()
    found[1][0].quant_method.moe_kernel = moe = Quantised(None)
    moe.impl = Quantised(None)
    moe.impl.fused_experts = object.__new__(MarlinLinearKernel)
    assert locking_kernel(found) == "MarlinLinearKernel"


def test_scratch_space_that_kernels_have_taken_is_found(
    manager: workspace.WorkspaceManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Space of vLLM's, by its name or without one, and FlashInfer's buffer."""
    assert shared_scratch(model()) is None
    manager._current_workspaces[0] = torch.zeros(4)
    assert "of no name" in (shared_scratch(model()) or "")
    manager.get_persistent(("some locks", 0), (4,), torch.int)
    assert "some locks" in (shared_scratch(model()) or "")
    backend: Any = ModuleType("vllm.v1.attention.backends.flashinfer")
    backend.trtllm_workspace_buffer = torch.zeros(1)
    monkeypatch.setitem(sys.modules, backend.__name__, backend)
    assert "FlashInfer" in (shared_scratch(model()) or "")


def test_an_engine_with_such_kernels_has_no_lane() -> None:
    class Warm:
        def compile_or_warm_up_model(self) -> None:
            pass

    class Worker(LaneWorking, Warm):
        model_runner = SimpleNamespace(get_model=lambda: model(MarlinLinearKernel))

    with pytest.raises(ValueError, match=r"^engine_scheduler: MarlinLinear.*set engine_scheduler="):
        Worker().compile_or_warm_up_model()
