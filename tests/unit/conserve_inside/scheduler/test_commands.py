"""What the table says reaches the scheduler, and a scheduler that fails ends nothing."""

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
from vllm.v1.engine.core import EngineCore

from conserve.direct import Notice
from conserve.wire import history_key
from conserve_inside.scheduler.commands import Command, Release, SchedulerClient, offer_commands
from deployments.messages import SchedulerLoad
from tests.unit.conserve_inside.scheduler.stand_in import StandIn


class Core:
    """vLLM's client of an engine core, here with a scheduler in this process."""

    def __init__(self, engine: StandIn) -> None:
        self._engine = engine
        self.fails = False
        # A step is under way until then.
        self.goes_on: asyncio.Event | None = None
        self.asked = 0
        self.released: list[int] = []

    async def call_utility_async(self, method: str, command: Command) -> Any:
        assert method == "conserve_command"
        offer_commands()
        if self.fails:
            raise RuntimeError("the engine is dead")
        if self.goes_on is not None:
            self.asked += 1
            await self.goes_on.wait()
        if isinstance(command, Release):
            self.released.append(len(command.keys))
        # As vLLM passes what it does not know the type of.
        asked = msgspec.msgpack.decode(msgspec.msgpack.encode(command))
        said = EngineCore.conserve_command(SimpleNamespace(scheduler=self._engine.scheduler), asked)
        return msgspec.msgpack.decode(msgspec.msgpack.encode(said))


async def said(client: SchedulerClient) -> SchedulerLoad:
    """What the scheduler says now: the next beat has it."""
    client.load()
    await asyncio.sleep(0.01)
    load = client.load()
    assert load is not None
    return load


async def test_what_the_table_holds_is_held_for_so_long() -> None:
    engine = StandIn(policies={"retention": {"hold_s": 2.0}})
    client = SchedulerClient(SimpleNamespace(engine_core=Core(engine)))
    for number, history_id in enumerate(("soon", "late", "never", "unknown")):
        engine.turn(history_key(history_id, 7), range(number, number + 320))
    client.hold([("soon", 7, 8.0), ("late", 7, 50.0), ("never", 7, 0.0), ("soon", 6, 90.0)])
    await asyncio.sleep(0.01)
    pinned = []
    for now_s in (1.0, 4.0, 20.0, 70.0):
        engine.now_s = now_s
        engine.turn("other", range(5, 15), last=True)
        pinned.append((await said(client)).pinned_blocks)
    assert pinned == [30, 20, 10, 0]


async def test_what_is_paused_or_has_ended_is_let_go_then_and_there() -> None:
    engine = StandIn(policies={"retention": {"hold_s": 1_000.0, "longest_s": 1_000.0}})
    core = Core(engine)
    client = SchedulerClient(SimpleNamespace(engine_core=core))
    for number, history_id in enumerate(("paused", "ended", "lives")):
        engine.turn(history_key(history_id, 7), range(number, number + 320))
    load = await said(client)
    assert (load.pinned_blocks, load.begun["cold"]) == (30, 3)
    # Of another one by that name nothing is let go.
    client.hear(Notice(1, given_up=(("lives", 6),)))
    client.hear(Notice(2, given_up=(("paused", 7),), ended=(("ended", 7),)))
    await asyncio.sleep(0.01)
    assert (await said(client)).pinned_blocks == 10


async def test_a_scheduler_that_fails_or_hangs_holds_up_no_beat() -> None:
    core = Core(StandIn())
    core.fails = True
    client = SchedulerClient(SimpleNamespace(engine_core=core))
    client.load()
    client.hear(Notice(1, given_up=(("c", 1),)))
    await asyncio.sleep(0.01)
    assert client.load() is None
    await asyncio.sleep(0.01)
    core.fails, core.goes_on = False, asyncio.Event()
    for _ in range(3):
        assert client.load() is None
        await asyncio.sleep(0.01)
    assert core.asked == 1
    core.goes_on.set()
    await asyncio.sleep(0.01)
    assert client.load() is not None


async def test_a_thousand_that_end_at_once_leave_the_engine_time_for_steps() -> None:
    core = Core(StandIn())
    client = SchedulerClient(SimpleNamespace(engine_core=core))
    client.release([(f"c{number}", 1) for number in range(1000)])
    await asyncio.sleep(0.1)
    assert sum(core.released) == 1000
    assert max(core.released) <= 16
