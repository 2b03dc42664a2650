"""Loads the code of an engine's core, before anything else in that process.

A process that Python's multiprocessing spawns first runs the module that its parent was started
with. For a replica that is Ray's worker, which a core does not need, so it runs this file. It
imports what the core will need with the garbage collector off, whose scans take a fifth of that
time.

On a CPU it also replaces ``allocate_kv_cache`` of vLLM 0.29.0's ``gpu_model_runner``: check that
when the version changes.
"""

import contextlib
import gc
import math
import mmap
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# vLLM 0.29.0 binds all sockets between an engine's processes in this folder while it starts. Check
# that when the version changes.
_SOCKETS_FOLDER = "VLLM_RPC_BASE_PATH"


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


@contextlib.contextmanager
def unnamed_afterwards() -> Iterator[None]:
    """Remove the names of the sockets that an engine binds while it starts within this.

    Otherwise a killed engine leaves six files. Nothing connects to them once the engine has
    started.
    """
    before = os.environ.get(_SOCKETS_FOLDER)
    # Short: a socket's path has 107 bytes at most, and a UUID of 36 follows.
    os.environ[_SOCKETS_FOLDER] = folder = tempfile.mkdtemp(prefix="conserve-")
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SOCKETS_FOLDER]
        else:
            os.environ[_SOCKETS_FOLDER] = before
        shutil.rmtree(folder, ignore_errors=True)


def allocate_untouched(allocate: Callable[..., Any]) -> Callable[..., Any]:
    """Have a function that allocates with ``torch.zeros`` get mapped memory, which reads as zeros.

    The kernel clears a page when it is first used. Clearing a GiB takes seconds of a core.
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
