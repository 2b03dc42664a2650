"""Two routers behind one port, two prefillers, and first turns that are too short to move."""

import asyncio
import random

import httpx
import psutil
import pytest

from tests import harness
from tests.harness import Agent

pytestmark = pytest.mark.anyio

LONG, SHORT = 900, 20


async def _served(client: httpx.AsyncClient, url: str) -> dict[str, int]:
    """How many requests each prefiller has served."""
    engines = (await client.get(url + "/v1/engines")).json()["data"]
    counts = {}
    for engine in engines:
        if engine["role"] == "prefiller":
            text = (await client.get(engine["url"] + "/metrics")).text
            counts[engine["id"]] = sum(
                int(float(line.split()[-1]))
                for line in text.splitlines()
                if line.startswith("vllm:request_success_total{")
            )
    return counts


async def test_whatever_router_and_prefiller_a_conversation_meets(
    wide_app: str, client: httpx.AsyncClient, rng: random.Random
) -> None:
    """A connection a turn, so that turns of one conversation come through both routers."""
    served = await _served(client, wide_app)
    assert len(served) == 2
    handoffs = harness.metric("conserve_handoffs_total")

    async def converse(number: int) -> list[dict[str, int]]:
        agent = Agent(client, f"wide-{number}")
        for turn in range(4):
            async with httpx.AsyncClient(timeout=harness.TIMEOUT_S) as fresh:
                agent.client = fresh
                words = (LONG if number % 2 else SHORT) if turn == 0 else SHORT
                await agent.say(harness.text(rng, words), tokens=4)
        return agent.stats

    stats = await asyncio.gather(*(converse(number) for number in range(8)))
    assert harness.metric("conserve_handoffs_total") == handoffs + 4
    for number, turns in enumerate(stats):
        first, *later = turns
        assert (first["lmcache_tokens"] > 0) == (number % 2 == 1)
        assert all(turn["lmcache_tokens"] == 0 for turn in later)
    # The four long ones, and nothing else, are shared between the prefillers.
    more = {id: count - served[id] for id, count in (await _served(client, wide_app)).items()}
    assert sum(more.values()) == 4
    assert min(more.values()) >= 1


async def test_both_routers_listen(wide_app: str) -> None:
    port = int(wide_app.rsplit(":", 1)[1])
    listeners = {
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
    }
    assert len(listeners) == 2
