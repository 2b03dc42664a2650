"""Loads the code of an engine's core, before anything else in that process.

Python's multiprocessing has a spawned process run the module that its parent was started as: of a
replica that is Ray's worker, which a core has no use for. In its place a core runs this file. It
imports what the core will, with Python's garbage collector off: that looks at a million objects
again and again, none of which goes away, and takes a fifth of the import's time.

On a CPU it also has vLLM leave its KV space untouched until it is used (`allocate_untouched`, in
the place of what vLLM 0.29.0's ``gpu_model_runner`` calls: check it when that version changes).
"""

import contextlib
import gc
import math
import mmap
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


@contextlib.contextmanager
def core_loads_first(module: ModuleType) -> Iterator[None]:
    """Have processes that are spawned within this run a module first, as their ``__mp_main__``."""
    main = sys.modules["__main__"]
    before: ModuleSpec | None = main.__spec__
    main.__spec__ = module.__spec__
    try:
        yield
    finally:
        main.__spec__ = before


def allocate_untouched(allocate: Callable[..., Any]) -> Callable[..., Any]:
    """Have a function that allocates with ``torch.zeros`` get memory which reads as zeros anyway.

    The kernel clears a page when it is first used. Clearing a GiB beforehand takes one to three
    seconds of a core, and the memory.
    """
    import torch

    def zeros(*size: Any, dtype: torch.dtype, device: Any = "cpu") -> torch.Tensor:
        shape = torch.Size(size) if isinstance(size[0], int) else torch.Size(size[0])
        assert torch.device(device).type == "cpu"
        buffer = mmap.mmap(-1, max(1, math.prod(shape) * dtype.itemsize))
        return torch.frombuffer(buffer, dtype=dtype, count=math.prod(shape)).view(shape)

    def allocated(*given: Any, **named: Any) -> Any:
        before, torch.zeros = torch.zeros, zeros
        try:
            return allocate(*given, **named)
        finally:
            torch.zeros = before

    return allocated


def _load() -> None:
    gc.disable()
    try:
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            from vllm.v1.worker import gpu_model_runner

            untouched = allocate_untouched(gpu_model_runner.allocate_kv_cache)
            gpu_model_runner.allocate_kv_cache = untouched

        import deployments.engine.lmcache_connector  # noqa: F401
    finally:
        gc.enable()
    gc.freeze()


if __name__ == "__mp_main__":
    _load()
