"""Two routers behind one port, two prefillers, and first turns that are too short to move."""

import asyncio
import random

import httpx
import pytest

from tests.engines.applications import WIDE
from tests.engines.client import TIMEOUT_S, Agent, prose
from tests.engines.metrics import metric

pytestmark = [pytest.mark.anyio, pytest.mark.application(WIDE)]

LONG, SHORT = 900, 20


async def _served(client: httpx.AsyncClient, url: str) -> dict[str, int]:
    """How many requests each prefiller has served."""
    engines = (await client.get(url + "/v1/engines")).json()["data"]
    counts = {}
    for engine in engines:
        if engine["role"] == "prefiller":
            text = (await client.get(engine["url"] + "/metrics")).text
            counts[engine["id"]] = int(metric("vllm:request_success_total", text))
    return counts


async def test_whatever_router_and_prefiller_a_conversation_meets(
    application: str, client: httpx.AsyncClient, rng: random.Random
) -> None:
    """A connection a turn, so that turns of one conversation come through both routers."""
    served = await _served(client, application)
    assert len(served) == 2
    handoffs = metric("conserve_handoffs_total")

    async def converse(number: int) -> list[dict[str, int]]:
        agent = Agent(client, f"wide-{number}")
        for turn in range(4):
            async with httpx.AsyncClient(timeout=TIMEOUT_S) as fresh:
                agent.client = fresh
                words = (LONG if number % 2 else SHORT) if turn == 0 else SHORT
                await agent.say(prose(rng, words), tokens=4)
        return agent.stats

    stats = await asyncio.gather(*(converse(number) for number in range(8)))
    assert metric("conserve_handoffs_total") == handoffs + 4
    for number, turns in enumerate(stats):
        first, *later = turns
        assert (first["lmcache_tokens"] > 0) == (number % 2 == 1)
        assert all(turn["lmcache_tokens"] == 0 for turn in later)
    # The four long ones, and nothing else, are shared between the prefillers.
    more = {id: count - served[id] for id, count in (await _served(client, application)).items()}
    assert sum(more.values()) == 4
    assert min(more.values()) >= 1
