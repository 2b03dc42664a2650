"""A full system: who waits, who is refused, and what frees room."""

import asyncio
import random

import httpx
import pytest

from tests.engines.applications import SMALL
from tests.engines.client import Agent, chat, prose
from tests.engines.metrics import metric
from tests.engines.waiting import eventually

pytestmark = [pytest.mark.anyio, pytest.mark.application(SMALL)]

# The decoder has room for 3,072 tokens.
LARGE = 1200


async def _fill(client: httpx.AsyncClient, rng: random.Random) -> list[Agent]:
    agents = [Agent(client, f"full-{n}") for n in range(2)]
    for agent in agents:
        await agent.say(prose(rng, LARGE), tokens=4)
    return agents


async def test_waiting_in_line(
    application: str, client: httpx.AsyncClient, rng: random.Random
) -> None:
    """Room goes to the first in line."""
    await _fill(client, rng)
    waiting = []
    for number in range(2):
        agent = Agent(client, f"waits-{number}")
        waiting.append(asyncio.ensure_future(agent.say(prose(rng, LARGE), tokens=4)))
        await eventually(
            "it waits",
            lambda expected=number + 1: metric("conserve_queue_length") == expected,  # type: ignore[misc]
        )
    await client.delete(application + "/v1/conversations/full-0")
    reply = await waiting[0]
    assert reply.conversation == "waits-0"
    assert not waiting[1].done()
    await client.delete(application + "/v1/conversations/full-1")
    assert (await waiting[1]).conversation == "waits-1"
    assert metric("conserve_queue_length") == 0


async def test_a_bound_conversation_never_waits(
    application: str, client: httpx.AsyncClient, rng: random.Random
) -> None:
    """Its place is its own, however full the system is."""
    agents = await _fill(client, rng)
    queued = asyncio.ensure_future(
        chat(client, [{"role": "user", "content": prose(rng, LARGE)}], "queued")
    )
    await eventually("it waits", lambda: metric("conserve_queue_length") == 1)
    for agent in agents:
        assert (await agent.say("go on", tokens=4)).status == 200
    queued.cancel()
    await eventually("who left waits no more", lambda: metric("conserve_queue_length") == 0, 5)
    shown = (await client.get(application + "/v1/conversations")).json()["data"]
    assert {entry["id"] for entry in shown} == {"full-0", "full-1"}


async def test_waiting_too_long_and_idle_conversations(
    application: str, client: httpx.AsyncClient, rng: random.Random
) -> None:
    """A wait ends with 429 at the time set; an unused conversation ends and makes room."""
    await _fill(client, rng)

    tall = [{"role": "user", "content": prose(rng, LARGE)}]
    late = await chat(client, tall, "late")
    assert late.status == 429
    assert late.body["error"]["code"] == "queue_timeout"
    assert int(late.headers["retry-after"]) >= 1

    await eventually(
        "idle conversations have ended",
        lambda: metric("conserve_conversations") == 0,
        60,
    )
    assert metric("conserve_decoder_held_tokens") == 0
    assert (await chat(client, tall, "late", tokens=2)).status == 200
    assert metric("conserve_conversations_ended_total", reason="idle") >= 2
