"""Memory of a CPU engine's KV space: taken at the start, or when it is written."""

from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from vllm.v1.worker import gpu_model_runner, utils

_BYTES = 2**28


@pytest.fixture(autouse=True)
def as_vllm_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_model_runner, "allocate_kv_cache", utils.allocate_kv_cache)


def allocated() -> tuple[torch.Tensor, float]:
    """Return a KV space as vLLM's runner makes it, and the part of it that was taken."""
    layer = SimpleNamespace(layer_names=["0"], kv_cache_spec=SimpleNamespace(has_layer_views=False))
    config: Any = SimpleNamespace(
        kv_cache_tensors=[SimpleNamespace(size=_BYTES, layers=["0"])], kv_cache_groups=[layer]
    )
    process, zeros = psutil.Process(), torch.zeros
    before_bytes = process.memory_info().rss
    layers = gpu_model_runner.allocate_kv_cache(config, torch.device("cpu"), None)
    assert torch.zeros is zeros
    return layers["0"], (process.memory_info().rss - before_bytes) / _BYTES


def test_vllm_takes_all_at_the_start() -> None:
    _, taken = allocated()
    assert taken > 0.9


@pytest.mark.usefixtures("patched")
def test_patched_vllm_takes_what_is_written() -> None:
    space, taken = allocated()
    assert taken < 0.5
    assert (space.shape, space.dtype) == ((_BYTES,), torch.int8)
    part = space.view(torch.float32).view(-1, 1024)
    part[7] = 1.5
    assert part[7].sum() == 1.5 * 1024
    assert part[6].count_nonzero() == part[8].count_nonzero() == 0


@pytest.mark.usefixtures("patched")
def test_what_fails_leaves_pytorch_as_it_was() -> None:
    zeros = torch.zeros
    with pytest.raises(AttributeError):
        utils.allocate_kv_cache(None, torch.device("cpu"), None)
    assert torch.zeros is zeros
