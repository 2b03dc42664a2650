"""Clients report tools that slow each other down, and the window follows."""

import asyncio
import math
import random

import httpx
import pytest

from tests.engines.applications import PAUSING
from tests.engines.client import Agent, prose
from tests.engines.metrics import metric
from tests.engines.waiting import eventually

# It takes minutes: a pressure has to last, and the bound is lifted slowly.
pytestmark = [pytest.mark.anyio, pytest.mark.full, pytest.mark.application(PAUSING)]

AGENTS = 10
TOOL_S = 0.5


class Machine:
    """Two CPUs on which clients run their tools."""

    def __init__(self, application: str, client: httpx.AsyncClient) -> None:
        self._application = application
        self._client = client
        self._running = 0

    async def run(self, agent: Agent) -> None:
        """Run a tool, and report it as a client does."""
        await self._report(agent, "start")
        self._running += 1
        missing_s = TOOL_S
        while missing_s > 0:
            await asyncio.sleep(0.05)
            missing_s -= 0.05 * min(1.0, 2 / self._running)
        self._running -= 1
        await self._report(agent, "end")

    async def _report(self, agent: Agent, event: str) -> None:
        body = {"event": event, "tool": "make", "call_id": "call_1"}
        url = f"{self._application}/v1/conversations/{agent.id}/tools"
        told = await self._client.post(url, json=body)
        assert told.status_code == 200, told.text


def window() -> float:
    return metric("conserve_admission_window")


async def works(machine: Machine, agent: Agent, enough: asyncio.Event) -> None:
    """Run tools one after the other, with a turn after every third."""
    while not enough.is_set():
        for _ in range(3):
            await machine.run(agent)
        await agent.say("go on", tokens=4)


async def test_a_burst_of_agents_whose_tools_slow_each_other_down_is_slowed(
    application: str, client: httpx.AsyncClient, rng: random.Random
) -> None:
    """Two agents show how long tools take; with ten they take five times as long."""
    machine = Machine(application, client)
    agents = [Agent(client, f"builds-{number}") for number in range(AGENTS)]
    for agent in agents:
        await agent.say(prose(rng, 30), tokens=4)
    for _ in range(12):
        await asyncio.gather(*(machine.run(agent) for agent in agents[:2]))
    assert metric("conserve_tools_running") == 0
    assert metric("conserve_admission_pressure", of="tools") == 0
    assert window() == math.inf

    enough = asyncio.Event()
    burst = [asyncio.ensure_future(works(machine, agent, enough)) for agent in agents]
    await eventually("tools run", lambda: metric("conserve_tools_running") > 5)
    await eventually(
        "tools are under pressure",
        lambda: metric("conserve_admission_pressure", of="tools") > 0.5,
        90,
    )
    await eventually("the window shrinks", lambda: window() < AGENTS, 90)
    comes = Agent(client, "comes")
    waiting = asyncio.ensure_future(comes.say(prose(rng, 30), tokens=4))
    await eventually(
        "another agent waits for the window", lambda: metric("conserve_waiting", why="window") == 1
    )
    # The window refuses none, and those that it has admitted go on.
    assert (await waiting).status == 200
    enough.set()
    await asyncio.gather(*burst)

    await eventually(
        "the pressure is over", lambda: metric("conserve_admission_pressure", of="tools") == 0
    )
    await eventually("there is no bound", lambda: window() == math.inf, 240)
