"""Starts an LMCache server that takes no core while it is idle, and whose memory needs no /dev/shm.

The changes to LMCache and NIXL are files of `deployments.upstream`.
"""

import asyncio
import contextlib
import logging
import resource
import sys
from typing import Any

import msgspec

from deployments.messages import Copied
from deployments.upstream import named_pool, spinning_progress
from deployments.upstream.patch import require
from deployments.upstream.patches import apply_patches

# Value of `--shm-name` for a pool from `named_pool`.
OWN_POOL = "own"
HEALTH_PATH = "/conserve/healthcheck"
COPIES_PATH, FORGET_PATH = "/conserve/copies", "/conserve/forget"
_LOOK_UPS = "lmcache.v1.multiprocess.modules.lookup"


def lock_as_much_as_allowed() -> None:
    """Raise the limit of locked memory, which RDMA needs for all shared memory."""
    _, most = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (most, most))


def say_nothing_of_short_prompts() -> None:
    """Drop warnings that nothing is "touched" as a turn ends, where nothing is wrong.

    LMCache logs them for a prompt shorter than a chunk, and for a turn that it was not asked about.
    """

    def tells(record: logging.LogRecord) -> bool:
        return "skipping touch" not in str(record.msg)

    logging.getLogger(_LOOK_UPS).addFilter(tells)


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


def offer_copies(app: Any) -> None:
    """Let engines touch what host memory has of a prompt, and say whose files are whose."""
    from fastapi import Request
    from lmcache.v1.distributed.api import PrefetchLockMode, PrefetchTaskSpec
    from lmcache.v1.multiprocess.http_apis.dependencies import get_context

    def disk(engine: Any) -> Any:
        adapters = [one for _, one in engine.storage_manager.l2_adapters()]
        return next((one for one in adapters if hasattr(one, "forget")), None)

    def touch(engine: Any, asked: Copied) -> int:
        rows = _rows(engine.context, asked)
        if not rows:
            return 0
        spec = PrefetchTaskSpec(rows, fetching_policy="full", lock_mode=PrefetchLockMode.NO_LOCK)
        storage = engine.storage_manager
        storage.query_prefetch_status(storage.submit_prefetch_task(spec, skip_l2=True))
        if not asked.owner or (tier := disk(engine)) is None:
            return 0
        keys = [row.keys for row in rows if row.sliding_window_size < 0]
        return int(tier.own(asked.owner, keys) * engine.context.chunk_size)

    @app.post(COPIES_PATH)  # type: ignore[untyped-decorator]
    async def copies(request: Request) -> Any:
        asked = msgspec.json.decode(await request.body(), type=Copied)
        return {"kept_tokens": await asyncio.to_thread(touch, get_context(request).engine, asked)}

    @app.post(FORGET_PATH)  # type: ignore[untyped-decorator]
    async def forget(request: Request) -> Any:
        tier, owner = disk(get_context(request).engine), (await request.body()).decode()
        if tier is not None:
            await asyncio.to_thread(tier.forget, owner)
        return {}


def _rows(context: Any, asked: Copied) -> list[Any]:
    """Return the keys of a prompt's chunks, a row for each part that they have."""
    from lmcache.v1.multiprocess.cache_control.key_resolver import resolve_grouped_object_keys

    model = asked.model_name, asked.world_size
    layouts = context.layout_desc_registry.find_group_layout_descs(*model)
    if not layouts:
        return []
    windows = context.layout_desc_registry.find_attn_desc(*model)
    rows, _ = resolve_grouped_object_keys(
        context.token_hasher, *model, asked.token_ids, asked.cache_salt, layouts, windows
    )
    return list(rows)


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
    offer_copies(app)
    lmcache()


if __name__ == "__main__":
    main()
