"""Starts an LMCache server: one that shares KV with other nodes', or its memory with engines.

Sharing with other nodes is not to take a core. NIXL's thread for UCX's progress sleeps until
something arrives, but for at most a time that its Python API sets to zero: so it never sleeps, and
takes a whole core of an idle machine (measured: 98 %; with the time below: 0 %). What arrives still
wakes it at once.

Without a GPU it is to rest as well: LMCache looks 200 times a second whether a copy to or from one
has ended, which took as much as all of an idle engine.

It reaches into internals of nixl 1.5 (``nixlBind.nixlAgentConfig``, as its ``_api`` module uses
it) and of lmcache 0.5.6 (``DeviceHostFuncDispatcher``): check them when those versions change.
"""

import importlib
import resource
import sys
from types import ModuleType
from typing import Any

from deployments.node import kv_pool

# For `--shm-name`: memory of the server's own, see `kv_pool`.
OWN_POOL = "own"
# The packages in the order in which LMCache tries them.
NIXL_MODULES = ("nixl", "nixl_cu12", "nixl_cu13")
_LONGEST_SLEEP_US = 10_000
_LOOKS_EVERY_S = 1.0


def nixl_api() -> ModuleType:
    """The module of NIXL's that LMCache will use.

    Raises:
        ImportError: none is installed.
    """
    for name in NIXL_MODULES:
        try:
            found = importlib.import_module(f"{name}._api")
        except ImportError:
            continue
        # One package may pass on what another defines.
        return sys.modules[found.nixl_agent.__module__]
    raise ImportError(f"NIXL is not installed (none of {', '.join(NIXL_MODULES)})")


def let_progress_thread_sleep(api: ModuleType) -> None:
    """Have agents that are made from now on sleep while nothing arrives."""
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
    """Have dispatchers that are made from now on look for copies to or from a GPU rarely."""
    from lmcache.v1.multiprocess.native_completion import DeviceHostFuncDispatcher

    start: Any = DeviceHostFuncDispatcher.__init__
    start.__defaults__ = (_LOOKS_EVERY_S,)


def lock_as_much_as_allowed() -> None:
    """Raise this process's limit of locked memory to the most that it may set.

    A network card that reads memory by itself (RDMA) has it locked, and the whole of what is shared
    is made known to it.
    """
    _, most = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (most, most))


def main() -> None:
    """``python -m deployments.node.lmcache_main server ...``: as ``lmcache server ...``."""
    from lmcache.cli.main import main as lmcache

    if "nixl" in sys.argv:
        let_progress_thread_sleep(nixl_api())
        lock_as_much_as_allowed()
    if OWN_POOL in sys.argv:
        sys.argv[sys.argv.index(OWN_POOL)] = kv_pool.offer()
    # LMCache has loaded PyTorch.
    import torch

    if not torch.accelerator.is_available():
        look_less_often_for_copies()
    lmcache()


if __name__ == "__main__":
    main()
