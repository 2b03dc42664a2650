"""How conversations stand, as the manager of environments is told."""

import asyncio
import time

from conserve.wire import SILENCE_S
from deployments.messages import HostPressure, Standing
from tests.unit.deployments.table.drive import Drive, engine

ASKED = ["bound", "first", "second", "tenant\tx", "nobody"]


async def test_a_table_says_who_lives_and_who_waits_where() -> None:
    table = await Drive.of(queue_timeout_s=30, pausing=False)
    young = await table.lifecycle(ASKED, HostPressure())
    for one in (engine("prefiller", "prefiller"), engine("decoder")):
        await table.register(one)
    await table.router_beat("r")
    await table.turn("bound", 900)
    waiting = [await table.queued(name, 500) for name in ("first", "tenant\tx", "second")]
    seen = await table.lifecycle(ASKED, HostPressure(3, 0.5))
    await table.release("bound")
    after = await table.lifecycle(ASKED, HostPressure(3, 0.5))
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert table._housekeeping is not None
    table._housekeeping.cancel()
    # It does not know its predecessor's conversations yet.
    assert young.standings is None
    assert seen.standings == {
        "bound": Standing("live"),
        "first": Standing("waiting", 0),
        "tenant\tx": Standing("waiting", 1),
        "second": Standing("waiting", 2),
    }
    assert after.table == seen.table == young.table
    assert after.standings is not None
    assert "bound" not in after.standings


async def test_admission_learns_how_busy_tools_keep_their_machine() -> None:
    async def told(pressure: HostPressure, later_s: float) -> float:
        table = await Drive.of()
        await table.lifecycle([], pressure)
        return table._cpu_pressure(time.monotonic() + later_s)

    assert await told(HostPressure(3, 0.5), 1.0) == 0.5
    # Whatever keeps the machine busy then, it is no tool.
    assert await told(HostPressure(0, 0.5), 1.0) == 0.0
    assert await told(HostPressure(3, 0.5), SILENCE_S + 1) == 0.0
