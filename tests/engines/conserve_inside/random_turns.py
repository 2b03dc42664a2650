"""Random turns, whose answers have to be those of a lone engine."""

import asyncio
import random

import httpx

from tests.engines.client import Agent, chat, lone_answer, prose


async def _leaves(client: httpx.AsyncClient, name: str, words: str) -> None:
    """A client begins a long answer, and leaves in its midst."""
    began = asyncio.Event()
    messages = [{"role": "user", "content": words}]
    task = asyncio.create_task(chat(client, messages, name, tokens=2_000, stream=True, began=began))
    await asyncio.wait_for(began.wait(), 120)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def random_turns(
    client: httpx.AsyncClient,
    rng: random.Random,
    conversations: int,
    turns: int,
    appends: tuple[int, ...] = (15, 60, 250),
) -> None:
    """First turns come through LMCache; decodes, appends, ends and clients that leave meet on one
    decoder that is full soon, half of them in the background. Every answer is compared."""
    agents = [Agent(client, f"random-{number}") for number in range(conversations)]
    scripts = [
        [prose(rng, rng.choice((60, 300, 900))), *(prose(rng, rng.choice(appends))
         for _ in range(turns - 1))]
        for _ in agents
    ]  # fmt: skip
    lengths = [[rng.choice((4, 24, 60)) for _ in range(turns)] for _ in agents]

    async def run(agent: Agent, number: int) -> None:
        for turn, words in enumerate(scripts[number]):
            stream, priority = (turn + number) % 2 == 1, -(number // 2 % 2)
            tokens = lengths[number][turn]
            await agent.say(words, tokens=tokens, stream=stream, priority=priority)
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
