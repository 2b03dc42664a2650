"""A decoder with a lane for long prefills gives the answers of an engine that has none."""

import asyncio
import random

import httpx
import pytest

from tests.engines.applications import LANE
from tests.engines.client import Agent, chat, lone_answer, prose
from tests.engines.conserve_inside.random_turns import random_turns
from tests.engines.metrics import metric
from tests.engines.stage import Stage
from tests.engines.waiting import eventually

pytestmark = [pytest.mark.anyio, pytest.mark.application(LANE)]


async def test_long_appends_go_through_the_lane(
    application: str, stage: Stage, client: httpx.AsyncClient, rng: random.Random
) -> None:
    """First turns come through LMCache; then long appends come beside answers."""
    stage.wait_for_lone()
    client.base_url = httpx.URL(application)
    loaded, lane = metric("conserve_handoffs_total"), metric("conserve_engine_lane_prefills_total")
    talkers = [Agent(client, f"talks-{number}") for number in range(2)]
    readers = [Agent(client, f"reads-{number}") for number in range(2)]
    for agent in (*talkers, *readers):
        await agent.say(prose(rng, 200), tokens=4)
    assert metric("conserve_handoffs_total") >= loaded + 4

    async def talks(agent: Agent) -> None:
        for _ in range(4):
            await agent.say(prose(rng, 10), tokens=120, stream=True)

    async def reads(agent: Agent) -> None:
        for _ in range(2):
            await agent.say(prose(rng, 700), tokens=6)

    async def leaves() -> None:
        """A client comes with a long prompt, and leaves while it is prefilled."""
        messages = [*readers[0].messages[:2], {"role": "user", "content": prose(rng, 900)}]
        task = asyncio.create_task(chat(client, messages, "leaves", tokens=4, stream=True))
        await asyncio.sleep(0.3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    await asyncio.gather(*map(talks, talkers), *map(reads, readers), leaves())
    await eventually(
        "the lane was used",
        lambda: metric("conserve_engine_lane_prefills_total", outcome="done") > lane,
    )
    await eventually("it is empty", lambda: metric("conserve_engine_lane_running") == 0)
    assert metric("conserve_engine_lane_prefills_total", outcome="failed") == 0
    assert metric("conserve_engine_lane_computed_tokens_total") > 256
    for agent, tokens in ((talkers[0], 120), (talkers[1], 120), (readers[0], 6), (readers[1], 6)):
        for turn in range(len(agent.messages) // 2):
            asked, answer = agent.messages[: 2 * turn + 1], agent.messages[2 * turn + 1]
            lone = await lone_answer(client, asked, tokens if turn else 4)
            assert lone == answer["content"], (agent.id, turn)


@pytest.mark.long
async def test_hundreds_of_random_turns(
    application: str, stage: Stage, client: httpx.AsyncClient, rng: random.Random
) -> None:
    """With long appends, each on a decoder that is full of others."""
    stage.wait_for_lone()
    client.base_url = httpx.URL(application)
    lane = metric("conserve_engine_lane_prefills_total", outcome="done")
    for _ in range(6):
        await random_turns(client, rng, conversations=10, turns=5, appends=(15, 60, 500))
    await eventually("the lane is empty", lambda: metric("conserve_engine_lane_running") == 0)
    assert metric("conserve_engine_lane_prefills_total", outcome="done") > lane + 20
    assert metric("conserve_engine_lane_prefills_total", outcome="failed") == 0
