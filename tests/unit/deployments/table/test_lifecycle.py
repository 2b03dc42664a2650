"""How conversations stand, as the manager of environments is told."""

import asyncio
import time

from conserve.settings import Settings
from conserve.wire import SILENCE_S
from deployments.messages import (
    BeginTurn,
    EngineInfo,
    HostPressure,
    Lifecycle,
    PlaceTurn,
    Standing,
    TurnPlan,
    Unplaced,
)
from deployments.table.table import TableService

ASKED = ["bound", "placing", "first", "second", "tenant\tx", "nobody"]


async def _scene() -> tuple[Lifecycle, Lifecycle, Lifecycle]:
    table = TableService(Settings(decoders=1, queue_timeout_s=30, pausing=False))  # type: ignore[arg-type]
    young = await table.lifecycle(ASKED, HostPressure())
    for role in ("prefiller", "decoder"):
        await table.register(EngineInfo(role, role, f"http://{role}", 1, 1000, 1000))  # type: ignore[arg-type]
    await table.router_beat("r")

    async def place(name: str, tokens: int) -> object:
        begun = await table.begin(BeginTurn("r", name, None))
        assert isinstance(begun, Unplaced)
        return await table.place(PlaceTurn("r", begun.history_id, tokens, 0.0, begun.claim))

    assert isinstance(await place("bound", 900), TurnPlan)
    waiting = []
    for name in ("first", "tenant\tx", "second"):
        waiting.append(asyncio.ensure_future(place(name, 500)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert isinstance(await table.begin(BeginTurn("r", "placing", None)), Unplaced)
    seen = await table.lifecycle(ASKED, HostPressure(3, 0.5))
    await table.release("bound")
    after = await table.lifecycle(ASKED, HostPressure(3, 0.5))
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert table._housekeeping is not None
    table._housekeeping.cancel()
    return young, seen, after


def test_a_table_says_who_lives_and_who_waits_where() -> None:
    young, seen, after = asyncio.run(_scene())
    # It does not know its predecessor's conversations yet.
    assert young.standings is None
    assert seen.standings == {
        "bound": Standing("live"),
        "placing": Standing("live"),
        "first": Standing("waiting", 0),
        "tenant\tx": Standing("waiting", 1),
        "second": Standing("waiting", 2),
    }
    assert after.table == seen.table == young.table
    assert after.standings is not None
    assert "bound" not in after.standings


def test_admission_learns_how_busy_tools_keep_their_machine() -> None:
    async def told(pressure: HostPressure, later_s: float) -> float:
        table = TableService(Settings())
        await table.lifecycle([], pressure)
        return table._cpu_pressure(time.monotonic() + later_s)

    assert asyncio.run(told(HostPressure(3, 0.5), 1.0)) == 0.5
    # Whatever keeps the machine busy then, it is no tool.
    assert asyncio.run(told(HostPressure(0, 0.5), 1.0)) == 0.0
    assert asyncio.run(told(HostPressure(3, 0.5), SILENCE_S + 1)) == 0.0
