"""Has an engine on a CPU map its KV space instead of clearing it.

vLLM makes the space with ``torch.zeros``, which writes each page of it as the engine starts. The
kernel gives mapped memory that reads as zeros, and clears a page when it is first used.
"""

import functools
import mmap
import sys
from typing import Any

from deployments.upstream.patch import Patch

# Modules that import the function by its name; an engine's core loads one before its plugins.
_USERS = ("gpu_model_runner", "gpu.attn_utils")


def apply() -> None:
    import torch
    from vllm.v1.worker import utils

    allocate = utils.allocate_kv_cache

    def zeros(size: int, *, dtype: torch.dtype, device: Any) -> torch.Tensor:
        assert torch.device(device).type == "cpu"
        buffer = mmap.mmap(-1, size * dtype.itemsize)
        return torch.frombuffer(buffer, dtype=dtype, count=size)

    @functools.wraps(allocate)
    def allocated(*given: Any, **named: Any) -> Any:
        before, torch.zeros = torch.zeros, zeros
        try:
            return allocate(*given, **named)
        finally:
            torch.zeros = before

    for module in ("utils", *_USERS):
        if (loaded := sys.modules.get(f"vllm.v1.worker.{module}")) is not None:
            loaded.allocate_kv_cache = allocated  # type: ignore[attr-defined]


PATCH = Patch(
    name="zeroed_kv",
    seams=("vllm.v1.worker.utils:allocate_kv_cache",),
    why="an engine on a CPU starts later, half a second for each GiB, and takes memory for KV that "
    "it never has",
    upstream="not reported: on a CPU, allocate_kv_cache could map memory, which reads as zeros",
    process="engine",
    device="cpu",
)
