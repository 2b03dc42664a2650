"""Tests what a recorder gets of turns that the table has seen end."""

import asyncio

from conserve.direct import Digested, Ended, Report
from conserve.hints import Hints
from conserve.tenants.limits import Limits
from conserve.turn import TurnStats
from deployments.messages import TurnTenant
from tests.unit.deployments.table.drive import STATS, Drive, engine
from tests.unit.deployments.table.virtual_time import in_virtual_time

DECODER = engine("d", registration=1, host_tokens=5000)


async def salt(service: Drive) -> bytes:
    """Return what a decoder hears."""
    notice = await service.hear("d", 1, -1)
    assert notice is not None
    return notice.salt


@in_virtual_time
async def test_a_recorder_is_told_of_a_turn_by_its_router_and_its_decoder() -> None:
    service = await Drive.of(DECODER)
    assert await salt(service) == b""
    started = await service.recording(0)
    assert started.deployment == {
        "placement": "elastic", "parks": True, "profile": None,
        "engines": [("decoder", True, 1000, 5000)], "nodes": 1,
    }  # fmt: skip
    assert await salt(service)
    asking = asyncio.create_task(service.recording(started.newest))
    asked = await service.unplaced("acme\tc", tenant=TurnTenant("acme", Limits()))
    hints = Hints(priority=-1, parent="acme\tboss")
    plan = await service.placed(asked, hints=hints)
    await service.observe(
        plan.turn, TurnStats(outcome="completed", latency_s=2.0, ttft_s=0.5, effective_ago_s=1.0)
    )
    ended = Ended(plan.turn, STATS, (b"t" * 16,), True)
    assert not asking.done()
    await service.report("d", 1, Report(1, (ended, Digested(plan.turn, b"12345678")), 0))
    page = await asking
    (told,) = page.turns
    assert told["outcome"] == "completed"
    assert (told["prompt_tokens"], told["output_tokens"], told["blocks"]) == (100, 10, b"12345678")
    assert (told["tenant"], told["background"], told["ttft_s"]) == (1, True, 0.5)
    assert told["parent"] not in (None, told["conversation"])
    assert (await service.recording(started.newest, "ops")).turns == []


@in_virtual_time
async def test_a_recorder_waits_for_no_longer_than_it_may() -> None:
    service = await Drive.of(DECODER, engine("e"))
    started = await service.recording(0)
    assert started.deployment["nodes"] == 2
    began_s = asyncio.get_running_loop().time()
    assert (await service.recording(started.newest)).newest == started.newest
    waited_s = asyncio.get_running_loop().time() - began_s
    assert 9 <= waited_s <= 11
