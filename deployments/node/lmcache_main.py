"""Starts an LMCache server that takes no core while it is idle, and whose memory needs no /dev/shm.

It also discards KV that a worker had not finished copying when it ended.

NIXL's progress thread never sleeps, since its Python API sets the time to zero: it takes a whole
core of an idle machine (98 % measured; 0 % with the time below). Without a GPU, LMCache looks 200
times a second whether a copy has ended, which took as much as an idle engine.

It replaces internals of nixl 1.5 (``nixlBind.nixlAgentConfig``, as its ``_api`` module uses it) and
of lmcache 0.5.6 (``DeviceHostFuncDispatcher``, ``EngineDrivenTransferModule._release_entry``, and a
warning of the module of look-ups). Check them when those versions change.
"""

import importlib
import logging
import resource
import sys
from types import ModuleType
from typing import Any

from deployments.node import kv_pool

# Value of `--shm-name` for a pool from `kv_pool`.
OWN_POOL = "own"
# Packages in the order in which LMCache tries them.
NIXL_MODULES = ("nixl", "nixl_cu12", "nixl_cu13")
_LONGEST_SLEEP_US = 10_000
_LOOK_UPS = "lmcache.v1.multiprocess.modules.lookup"
_LOOKS_EVERY_S = 1.0


def nixl_api() -> ModuleType:
    """Return the module of NIXL that LMCache will use; raises `ImportError`."""
    for name in NIXL_MODULES:
        try:
            found = importlib.import_module(f"{name}._api")
        except ImportError:
            continue
        # One package may re-export what another defines.
        return sys.modules[found.nixl_agent.__module__]
    raise ImportError(f"NIXL is not installed (none of {', '.join(NIXL_MODULES)})")


def let_progress_thread_sleep(api: ModuleType) -> None:
    """Have later agents sleep while nothing arrives."""
    bindings = api.nixlBind
    config: type = bindings.nixlAgentConfig

    class SleepingConfig(config):  # type: ignore[misc]  # Compiled, without types.
        """Takes the delay of zero for the one above."""

        @property
        def pthrDelay(self) -> int:
            return int(config.pthrDelay.__get__(self))  # type: ignore[attr-defined]

        @pthrDelay.setter
        def pthrDelay(self, microseconds: int) -> None:
            delay = microseconds or _LONGEST_SLEEP_US
            config.pthrDelay.__set__(self, delay)  # type: ignore[attr-defined]

    bindings.nixlAgentConfig = SleepingConfig


def look_less_often_for_copies() -> None:
    """Have later dispatchers rarely look for copies to or from a GPU."""
    from lmcache.v1.multiprocess.native_completion import DeviceHostFuncDispatcher

    start: Any = DeviceHostFuncDispatcher.__init__
    start.__defaults__ = (_LOOKS_EVERY_S,)


def discard_unfinished_copies() -> None:
    """Have the server discard chunks that an ended worker had begun to copy, and not committed.

    LMCache 0.5.6 makes them readable when it unregisters the worker, so later conversations with
    that prompt would load KV of which a part was never written, and get wrong answers.
    """
    from lmcache.v1.distributed.storage_manager import _L1_WRITE_TAG
    from lmcache.v1.multiprocess.modules.engine_driven_transfer import EngineDrivenTransferModule

    release: Any = EngineDrivenTransferModule._release_entry

    def discard_and_release(self: Any, instance_id: int, entry: Any) -> None:
        pending = self._pending_shm_writes
        with self._pending_shm_lock:
            unfinished = [pending.pop(store) for store in list(pending) if store[0] == instance_id]
        for keys in unfinished:
            self._ctx.storage_manager._l1_manager.finish_write_and_delete(keys, tag=_L1_WRITE_TAG)
        release(self, instance_id, entry)

    EngineDrivenTransferModule._release_entry = discard_and_release


def lock_as_much_as_allowed() -> None:
    """Raise the limit of locked memory, which RDMA needs for all shared memory."""
    _, most = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (most, most))


def say_nothing_of_short_prompts() -> None:
    """Drop the warning that a prompt shorter than a chunk, which has no keys, is not "touched".

    LMCache logs it at the end of each such turn, and nothing is wrong.
    """

    def tells(record: logging.LogRecord) -> bool:
        return "has no lookup ipc key" not in str(record.msg)

    logging.getLogger(_LOOK_UPS).addFilter(tells)


def main() -> None:
    from lmcache.cli.main import main as lmcache

    if "nixl" in sys.argv:
        let_progress_thread_sleep(nixl_api())
        lock_as_much_as_allowed()
    if OWN_POOL in sys.argv:
        sys.argv[sys.argv.index(OWN_POOL)] = kv_pool.offer()
    # LMCache has already loaded PyTorch.
    import torch

    if not torch.accelerator.is_available():
        look_less_often_for_copies()
    discard_unfinished_copies()
    say_nothing_of_short_prompts()
    lmcache()


if __name__ == "__main__":
    main()
