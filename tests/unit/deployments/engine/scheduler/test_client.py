"""What the table says reaches the scheduler, and a scheduler that fails ends nothing."""

import asyncio
from types import SimpleNamespace
from typing import Any

from conserve.direct import Notice
from conserve.wire import history_key
from deployments.engine.scheduler.client import SchedulerClient
from tests.unit.deployments.engine.scheduler.stand_in import StandIn


class Core:
    """vLLM's client of an engine core, here with a scheduler in this process."""

    def __init__(self, engine: StandIn) -> None:
        self._engine = engine
        self.fails = False

    async def call_utility_async(self, method: str, name: str, given: dict[str, Any]) -> Any:
        assert method == "conserve_command"
        if self.fails:
            raise RuntimeError("the engine is dead")
        return self._engine.scheduler.conserve(name, given)


def test_what_is_paused_or_has_ended_is_let_go_then_and_there() -> None:
    async def scenario() -> None:
        engine = StandIn(policies={"retention": {"hold_s": 1_000.0, "longest_s": 1_000.0}})
        core = Core(engine)
        client = SchedulerClient(SimpleNamespace(engine_core=core))
        for number, history_id in enumerate(("paused", "ended", "lives")):
            engine.turn(history_key(history_id, 7), range(number, number + 320))
        load = await client.load()
        assert load is not None
        assert (load.pinned_blocks, load.begun["cold"]) == (30, 3)
        # Of another one by that name nothing is let go.
        client.hear(Notice(1, given_up=(("lives", 6),)))
        client.hear(Notice(2, given_up=(("paused", 7),), ended=(("ended", 7),)))
        await asyncio.sleep(0.01)
        load = await client.load()
        assert load is not None
        assert load.pinned_blocks == 10

    asyncio.run(scenario())


def test_a_scheduler_that_does_not_answer_fails_no_beat() -> None:
    async def scenario() -> None:
        core = Core(StandIn())
        core.fails = True
        client = SchedulerClient(SimpleNamespace(engine_core=core))
        assert await client.load() is None
        client.hear(Notice(1, given_up=(("c", 1),)))
        await asyncio.sleep(0.01)

    asyncio.run(scenario())
