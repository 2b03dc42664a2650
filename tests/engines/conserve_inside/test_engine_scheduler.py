"""A decoder whose scheduler knows conversations gives the answers of an engine that does not."""

import asyncio
import random

import httpx
import pytest

from tests.engines.applications import SCHEDULED
from tests.engines.client import Agent, prose
from tests.engines.conserve_inside.random_turns import random_turns
from tests.engines.metrics import metric
from tests.engines.stage import Stage
from tests.engines.waiting import eventually

pytestmark = [pytest.mark.anyio, pytest.mark.application(SCHEDULED)]


async def test_random_turns_have_the_answers_of_a_lone_engine(
    application: str, stage: Stage, client: httpx.AsyncClient, rng: random.Random
) -> None:
    stage.wait_for_lone()
    client.base_url = httpx.URL(application)
    loaded = metric("conserve_handoffs_total")
    await random_turns(client, rng, conversations=8, turns=4)
    assert metric("conserve_handoffs_total") > loaded
    # What it says of itself comes with its beats.
    await eventually(
        "a turn was resumed", lambda: metric("conserve_engine_begun_total", kind="resume") > 0
    )
    assert metric("conserve_engine_free_blocks") > 0
    # Its warm-up told how long a lone decode takes, here a few milliseconds.
    assert metric("conserve_engine_tpot_bound_seconds") not in (0, 0.05)


@pytest.mark.long
async def test_hundreds_ofrandom_turns(
    application: str, stage: Stage, client: httpx.AsyncClient, rng: random.Random
) -> None:
    stage.wait_for_lone()
    client.base_url = httpx.URL(application)
    reclaimed = metric("conserve_engine_reclaimed_blocks_total")
    for _ in range(6):
        await random_turns(client, rng, conversations=10, turns=5)
    await eventually(
        "some was kept until others needed its room",
        lambda: metric("conserve_engine_reclaimed_blocks_total") > reclaimed,
    )


async def test_what_has_ended_is_not_kept(
    application: str, client: httpx.AsyncClient, rng: random.Random
) -> None:
    """An end is told to the engine at once, though it would have kept the history."""
    client.base_url = httpx.URL(application)
    agents = [Agent(client, f"kept-{number}") for number in range(2)]
    for _ in range(2):
        await asyncio.gather(*(agent.say(prose(rng, 300), tokens=4) for agent in agents))
    headers = {"X-ConServe-Expected-Resume-S": "25"}
    for agent in agents:
        agent.messages.append({"role": "user", "content": "go on"})
        assert (await agent.ask(tokens=4, headers=headers)).status == 200
    await eventually("kept", lambda: metric("conserve_engine_pinned_blocks") >= 4)
    for agent in agents:
        await client.delete(f"/v1/conversations/{agent.id}")
    await eventually("let go", lambda: metric("conserve_engine_pinned_blocks") == 0, 15.0)
