"""Finds kernels that keep scratch space, which two streams, or a part of the SMs, cannot share.

Marlin's kernels for quantised weights lock parts of their output, as many as the GPU has SMs: their
blocks wait for each other, and for ever if not all of them are resident. Others write to one buffer
a process. The prefill lane runs the same layers on a stream beside the step's.
"""

import sys
from collections.abc import Iterator
from typing import Any

_FLASHINFER = "vllm.v1.attention.backends.flashinfer"


def locking_kernel(model: Any) -> str | None:
    """Return the name of a loaded kernel whose blocks wait for each other, or None."""
    return _kernel_of(model, "marlin")


def shared_scratch(model: Any) -> str | None:
    """Return what streams of this process would share, once the engine has warmed up."""
    from vllm.v1.worker import workspace

    if (name := locking_kernel(model)) is not None:
        return f"{name} locks parts of its output"
    buffer = getattr(sys.modules.get(_FLASHINFER), "trtllm_workspace_buffer", None)
    if buffer is not None or _kernel_of(model, "kernels.linear.scaled_mm.flashinfer"):
        return "FlashInfer's kernels write to one buffer"
    if not workspace.is_workspace_manager_initialized():
        return None
    manager = workspace.current_workspace_manager()
    kept = [key for one in manager._persistent_resources for key in one]
    if kept or any(one is not None for one in manager._current_workspaces):
        return f"kernels keep scratch space ({', '.join(map(str, kept)) or 'of no name'})"
    return None


def _kernel_of(model: Any, module: str) -> str | None:
    owned = (one for layer in model.modules() for one in _owned(layer, depth=4))
    return next((type(one).__qualname__ for one in owned if module in type(one).__module__), None)


def _owned(owner: Any, depth: int) -> Iterator[Any]:
    for one in vars(owner).values():
        if depth and type(one).__module__.startswith("vllm.") and hasattr(one, "__dict__"):
            yield one
            yield from _owned(one, depth - 1)
