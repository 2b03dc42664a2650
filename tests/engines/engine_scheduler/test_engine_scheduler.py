"""A decoder whose scheduler knows conversations gives the answers of an engine that does not."""

import asyncio
import random

import httpx
import pytest

from tests.engines.applications import SCHEDULED
from tests.engines.client import Agent, chat, lone_answer, prose
from tests.engines.metrics import metric
from tests.engines.stage import Stage
from tests.engines.waiting import eventually

pytestmark = [pytest.mark.anyio, pytest.mark.application(SCHEDULED)]


async def _leaves(client: httpx.AsyncClient, name: str, words: str) -> None:
    """A client begins a long answer, and leaves in its midst."""
    began = asyncio.Event()
    messages = [{"role": "user", "content": words}]
    task = asyncio.create_task(chat(client, messages, name, tokens=2_000, stream=True, began=began))
    await asyncio.wait_for(began.wait(), 120)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _random_turns(
    client: httpx.AsyncClient, rng: random.Random, conversations: int, turns: int
) -> None:
    """First turns come through LMCache; decodes, appends, ends and clients that leave meet on one
    decoder that is full soon. Every answer is compared."""
    agents = [Agent(client, f"random-{number}") for number in range(conversations)]
    scripts = [
        [prose(rng, rng.choice((60, 300, 900))), *(prose(rng, rng.choice((15, 60, 250)))
         for _ in range(turns - 1))]
        for _ in agents
    ]  # fmt: skip
    lengths = [[rng.choice((4, 24, 60)) for _ in range(turns)] for _ in agents]

    async def run(agent: Agent, number: int) -> None:
        for turn, words in enumerate(scripts[number]):
            await agent.say(words, tokens=lengths[number][turn], stream=(turn + number) % 2 == 1)
            if turn == 1 and number % 4 == 3:
                await _leaves(client, f"leaves-{number}", prose(rng, 200))
        if number % 3 == 0:
            # Its room is free then and there.
            await client.delete(f"/v1/conversations/{agent.id}")

    await asyncio.gather(*(run(agent, number) for number, agent in enumerate(agents)))
    for number, agent in enumerate(agents):
        for turn in range(turns):
            asked, answer = agent.messages[: 2 * turn + 1], agent.messages[2 * turn + 1]
            lone = await lone_answer(client, asked, lengths[number][turn])
            assert lone == answer["content"], (agent.id, turn)


async def test_random_turns_have_the_answers_of_a_lone_engine(
    application: str, stage: Stage, client: httpx.AsyncClient, rng: random.Random
) -> None:
    stage.wait_for_lone()
    client.base_url = httpx.URL(application)
    loaded = metric("conserve_handoffs_total")
    await _random_turns(client, rng, conversations=8, turns=4)
    assert metric("conserve_handoffs_total") > loaded
    # What it says of itself comes with its beats.
    await eventually(
        "a turn was resumed", lambda: metric("conserve_engine_begun_total", kind="resume") > 0
    )
    assert metric("conserve_engine_free_blocks") > 0


@pytest.mark.long
async def test_hundreds_of_random_turns(
    application: str, stage: Stage, client: httpx.AsyncClient, rng: random.Random
) -> None:
    stage.wait_for_lone()
    client.base_url = httpx.URL(application)
    for _ in range(6):
        await _random_turns(client, rng, conversations=10, turns=5)


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
