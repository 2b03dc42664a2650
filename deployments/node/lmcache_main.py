"""Starts an LMCache server that takes no core while it is idle, and whose memory needs no /dev/shm.

The changes to LMCache and NIXL are files of `deployments.upstream`.
"""

import asyncio
import contextlib
import logging
import resource
import sys
from typing import Any

from deployments.upstream import named_pool, spinning_progress
from deployments.upstream.patch import require
from deployments.upstream.patches import apply_patches

# Value of `--shm-name` for a pool from `named_pool`.
OWN_POOL = "own"
HEALTH_PATH = "/conserve/healthcheck"
_LOOK_UPS = "lmcache.v1.multiprocess.modules.lookup"


def lock_as_much_as_allowed() -> None:
    """Raise the limit of locked memory, which RDMA needs for all shared memory."""
    _, most = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (most, most))


def say_nothing_of_short_prompts() -> None:
    """Drop warnings that nothing is "touched" as a turn ends, where nothing is wrong.

    LMCache logs them for a prompt shorter than a chunk, and for a turn that it was not asked about.
    """
    logging.getLogger(_LOOK_UPS).addFilter(lambda one: "skipping touch" not in str(one.msg))


def offer_health(app: Any) -> None:
    """Add a health check of LMCache's own and of a copy from each GPU that this process uses.

    After an error of CUDA's that stays, every copy fails, and LMCache calls itself healthy.
    """
    import torch
    from fastapi import Request
    from lmcache.v1.multiprocess.http_apis.info_api import healthcheck

    def copies() -> None:
        # To ask is free: a context on a GPU that is not used would take half a gigabyte.
        for gpu in range(torch.cuda.device_count()):
            # A GPU without room for it is full, and works.
            with contextlib.suppress(torch.OutOfMemoryError):
                if torch._C._cuda_hasPrimaryContext(gpu):
                    torch.ones(1, device=f"cuda:{gpu}").cpu()

    @app.get(HEALTH_PATH)  # type: ignore[untyped-decorator]  # LMCache ships no types.
    async def health(request: Request) -> Any:
        await asyncio.to_thread(copies)
        return await healthcheck(request)


def main() -> None:
    from lmcache.cli.main import main as lmcache

    if "nixl" in sys.argv:
        require(spinning_progress.PATCH)
        spinning_progress.sleep_when_idle()
        lock_as_much_as_allowed()
    if OWN_POOL in sys.argv:
        require(named_pool.PATCH)
        sys.argv[sys.argv.index(OWN_POOL)] = named_pool.offer()
    apply_patches("lmcache")
    say_nothing_of_short_prompts()
    from lmcache.v1.multiprocess.http_server import app

    offer_health(app)
    lmcache()


if __name__ == "__main__":
    main()
