"""A whole run, on an application that is up."""

import asyncio
import time
from collections.abc import Sequence

import httpx

from conserve.settings import Settings
from tests.acceptance.chaos import rest
from tests.acceptance.chaos.client import Clients
from tests.acceptance.chaos.killer import Killer
from tests.acceptance.chaos.plan import Plan, PlannedKill
from tests.acceptance.chaos.tally import Tally
from tests.acceptance.chaos.traces import Traces
from tests.engines.stage import Stage

_LOOK_S = 15.0


async def run(
    plan: Plan,
    kills: Sequence[PlannedKill],
    url: str,
    stage: Stage,
    decoders: int,
    tally: Tally,
    traces: Traces | None = None,
) -> None:
    """Play a plan to its end, wait until everything is back, and see whether all agree.

    Args:
        url: the application's.
        decoders: how many it has when it is whole.
        traces: looks at the processes meanwhile.
    """
    tally.began_s = began_s = time.monotonic()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=plan.clients)
    looking = asyncio.ensure_future(_look(traces)) if traces is not None else None
    async with httpx.AsyncClient(timeout=180, limits=limits) as client:
        until_s = began_s + plan.duration_s
        clients = Clients(plan, url, tally, client, until_s)
        killer = Killer(url, decoders, tally)
        killing = asyncio.ensure_future(killer.carry_out(kills, began_s, until_s))
        await clients.play()
        killing.cancel()
        await asyncio.wait([killing])
        if not killing.cancelled():
            killing.result()
    if looking is not None:
        looking.cancel()
        await asyncio.wait([looking])
    await asyncio.to_thread(stage.wait_until_whole)
    if traces is not None:
        await asyncio.to_thread(traces.look)
    await rest.check(url, tally)


async def _look(traces: Traces) -> None:
    while True:
        await asyncio.to_thread(traces.look)
        await asyncio.sleep(_LOOK_S)


def continues_streams() -> bool:
    """Whether streams outlive their decoders, by default."""
    field = Settings.model_fields.get("continue_streams")
    return field is not None and bool(field.default)
