"""Several histories of one conversation, and going back in one.

What is cached is what the engine reports of each turn.
"""

import asyncio
import random
from typing import Any

import httpx
import pytest

from tests.engines.applications import MAIN, URL
from tests.engines.client import Agent, Message, Reply, chat, prose
from tests.engines.metrics import metric

pytestmark = [pytest.mark.anyio, pytest.mark.application(MAIN)]

# Two of a CPU engine's.
BLOCKS_TOKENS = 2 * 128


async def shown(client: httpx.AsyncClient, name: str) -> dict[str, Any]:
    response = await client.get(f"{URL}/v1/conversations/{name}")
    assert response.status_code == 200, response.text
    conversation: dict[str, Any] = response.json()
    return conversation


def prompt_tokens(reply: Reply) -> int:
    """Of an answer that was not streamed."""
    assert reply.status == 200, reply.body
    return int(reply.body["usage"]["prompt_tokens"])


async def test_a_title_and_the_agents_turn_under_one_id(
    application: str, client: httpx.AsyncClient, rng: random.Random
) -> None:
    """As opencode sends them: at once, with nothing in common."""
    title: list[Message] = [
        {"role": "system", "content": f"Write a title. {prose(rng, 200)}"},
        {"role": "user", "content": "mend the tests"},
    ]
    work = Agent(client, "both", [{"role": "system", "content": prose(rng, 700)}])
    handoffs = metric("conserve_handoffs_total")
    titled, _ = await asyncio.gather(chat(client, title, "both"), work.say("mend the tests"))
    assert titled.status == 200
    assert titled.conversation == work.replies[0].conversation == "both"
    # Each was a cold prompt, and moved once.
    assert metric("conserve_handoffs_total") - handoffs == 2
    # Another side call comes between the agent's turns, and changes nothing for it.
    await work.say("and now the docs")
    held = (await shown(client, "both"))["held_tokens"]
    side = await chat(client, [{"role": "user", "content": f"hello {prose(rng, 20)}"}], "both")
    assert side.status == 200
    conversation = await shown(client, "both")
    assert len(conversation["histories"]) == 3
    assert conversation["held_tokens"] > held
    before = work.stats[-1]["prompt_tokens"] + work.stats[-1]["output_tokens"]
    await work.say("and the rest")
    assert work.stats[-1]["decoder_cached_tokens"] >= before - BLOCKS_TOKENS
    assert work.stats[-1]["lmcache_tokens"] == 0
    assert {reply.decoder for reply in work.replies} == {work.replies[0].decoder}
    assert len((await shown(client, "both"))["histories"]) == 3


async def test_sub_agents_count_as_what_they_are(
    application: str, client: httpx.AsyncClient, rng: random.Random
) -> None:
    agents = [
        Agent(client, "session", [{"role": "system", "content": prose(rng, 150 + 10 * number)}])
        for number in range(12)
    ]
    await asyncio.gather(*(agent.say("begin", tokens=4) for agent in agents))
    conversation = await shown(client, "session")
    assert conversation["turns"] == len(conversation["histories"]) == 12
    held = sum(one["held_tokens"] for one in conversation["histories"])
    assert conversation["held_tokens"] == held
    assert held > sum(150 + 10 * number for number in range(12))
    in_all = sum(
        metric("conserve_decoder_held_tokens", decoder=decoder)
        for decoder in {one["decoder"] for one in conversation["histories"]}
    )
    # But for system parts' last words, nothing is shared.
    assert in_all == held


@pytest.mark.parametrize("name", ["named", None])
async def test_who_goes_back_starts_warm(
    application: str, client: httpx.AsyncClient, rng: random.Random, name: str | None
) -> None:
    system: Message = {"role": "system", "content": prose(rng, 300)}
    agent = Agent(client, name, [system])
    turns = 20
    for number in range(turns):
        await agent.say(f"{number}: {prose(rng, 60)}", tokens=8)
    decoder = agent.replies[0].decoder
    ends = [one["prompt_tokens"] + one["output_tokens"] for one in agent.stats]
    handoffs = metric("conserve_handoffs_total")

    async def back(messages: list[Message], common_tokens: int, *, goes_on: bool = False) -> None:
        """A turn with these messages finds so many tokens at the history's decoder.

        Args:
            goes_on: it may be the one that goes on with the history, and leaves it nowhere.
        """
        reply = await chat(client, messages, name, tokens=8)
        assert reply.decoder == decoder
        cached_tokens = reply.body["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached_tokens >= common_tokens - BLOCKS_TOKENS
        assert prompt_tokens(reply) - cached_tokens < 3 * BLOCKS_TOKENS
        if name is None and not goes_on:
            assert reply.conversation != agent.replies[0].conversation

    # Regenerated: the last turn again. Edited: another last message. Forked: from the middle.
    await back(agent.messages[:-1], ends[-2])
    edited: Message = {"role": "user", "content": f"rather {prose(rng, 30)}"}
    await back([*agent.messages[:-2], edited], ends[-2])
    middle = 1 + 2 * (turns // 2)
    await back([*agent.messages[:middle], edited], ends[turns // 2 - 1])
    await asyncio.gather(
        *(
            back(
                [*agent.messages, {"role": "user", "content": f"{number}: {prose(rng, 20)}"}],
                ends[-1],
                goes_on=True,
            )
            for number in range(3)
        )
    )
    if name is not None:
        # Compacted: the system part stays, and a summary takes the place of the rest.
        summary: Message = {"role": "user", "content": f"so far: {prose(rng, 40)}"}
        await back([system, summary], agent.stats[0]["prompt_tokens"] - 100)
    assert metric("conserve_handoffs_total") == handoffs
    # What they have in common counts once.
    held = metric("conserve_decoder_held_tokens", decoder=decoder)
    assert ends[-1] < held < 2 * ends[-1]
