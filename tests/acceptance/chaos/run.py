"""A whole run, on an application that is up."""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from tests.acceptance.chaos import rest
from tests.acceptance.chaos.client import Clients
from tests.acceptance.chaos.killer import Killer
from tests.acceptance.chaos.plan import Plan, PlannedKill
from tests.acceptance.chaos.tally import Tally
from tests.acceptance.chaos.traces import Traces
from tests.engines.applications import URL
from tests.engines.metrics import exposed, metric
from tests.engines.stage import Stage

_LOOK_S = 1.0
REJOINED = "conserve_rejoined_turns_total"
_LMCACHE_URL = "http://127.0.0.1:7611"
# Metrics that are followed, and where they are.
COUNTED = {
    REJOINED: URL,
    "conserve_disk_written_bytes": _LMCACHE_URL,
    "conserve_disk_read_bytes": _LMCACHE_URL,
    "conserve_disk_damaged_files": _LMCACHE_URL,
}
# Some streams that break are answers at their ends, or of decoders that die as well.
_SOME_REJOIN = 10


async def run(
    plan: Plan,
    kills: Sequence[PlannedKill],
    url: str,
    stage: Stage,
    decoders: int,
    tally: Tally,
    traces: Traces | None = None,
    disk: Path | None = None,
) -> None:
    """Play a plan to its end, wait until everything is back, and see whether all agree.

    Args:
        url: the application's.
        decoders: how many it has when it is whole.
        traces: looks at the processes meanwhile.
        disk: the folder of its files of KV; None: it has none.
    """
    tally.began_s = began_s = time.monotonic()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=plan.clients)
    looking = asyncio.ensure_future(_look(tally, traces))
    async with httpx.AsyncClient(timeout=180, limits=limits) as client:
        until_s = began_s + plan.duration_s
        clients = Clients(plan, url, tally, client, until_s)
        killer = Killer(decoders, tally, disk)
        killing = asyncio.ensure_future(killer.carry_out(kills, began_s, until_s))
        await clients.play()
        killing.cancel()
        await asyncio.wait([killing])
        if not killing.cancelled():
            killing.result()
    await asyncio.to_thread(stage.wait_until_whole)
    await asyncio.sleep(2 * _LOOK_S)
    looking.cancel()
    await asyncio.wait([looking])
    if tally.cut["router"] >= _SOME_REJOIN and not tally.counted[REJOINED]:
        tally.fail(f"{tally.cut['router']} streams broke with their routers, and none was rejoined")
    await rest.check(url, tally)


async def _look(tally: Tally, traces: Traces | None) -> None:
    while True:
        for name, at in COUNTED.items():
            with contextlib.suppress(httpx.HTTPError):
                text = await asyncio.to_thread(exposed, at)
                # Without its process the application shows others.
                if f"\n{name} " in text:
                    tally.count(name, metric(name, text))
        if traces is not None:
            await asyncio.to_thread(traces.look)
        await asyncio.sleep(_LOOK_S)
