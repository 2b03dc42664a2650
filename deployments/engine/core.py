"""Loads the code of an engine's core, before anything else in that process.

A process that Python's multiprocessing spawns first runs the module that its parent was started
with. For a replica that is Ray's worker, which a core does not need, so it runs this file. It
imports what the core will need with the garbage collector off, whose scans take a fifth of that
time.
"""

import contextlib
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType

# vLLM's setting of the folder in which it binds all sockets between an engine's processes.
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

    Otherwise a killed engine leaves six files. Nothing connects to them after the start.
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


def _load() -> None:
    gc.disable()
    try:
        from vllm.platforms import current_platform  # noqa: F401

        import deployments.engine.lmcache_connector  # noqa: F401
    finally:
        gc.enable()
    gc.freeze()


if __name__ == "__mp_main__":
    _load()
