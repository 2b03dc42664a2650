"""Where conversations go, and when their tokens stop counting."""

import asyncio
import random

import httpx
import pytest

from tests.engines.applications import MAIN
from tests.engines.client import Agent, engines, prose
from tests.engines.metrics import metric
from tests.engines.waiting import eventually

pytestmark = [pytest.mark.anyio, pytest.mark.application(MAIN)]


async def test_the_emptier_decoder_gets_the_next_and_release_counts_at_once(
    application: str, client: httpx.AsyncClient, rng: random.Random
) -> None:
    """A long conversation makes its decoder the fuller one until it is deleted."""
    long_one = Agent(client, "long")
    big = await long_one.say(prose(rng, 3000), tokens=4)
    decoders = set()
    for number in range(3):
        reply = await Agent(client, f"short-{number}").say(prose(rng, 100), tokens=4)
        decoders.add(reply.decoder)
    assert decoders == {engine["id"] for engine in engines("decoder")} - {big.decoder}

    deleted = await client.delete(f"{application}/v1/conversations/long")
    assert deleted.json() == {"id": "long", "object": "conversation.deleted", "deleted": True}
    occupancy = {engine["id"]: engine["held_tokens"] for engine in engines("decoder")}
    assert occupancy[big.decoder] == 0
    reply = await Agent(client, "next").say(prose(rng, 100), tokens=4)
    assert reply.decoder == big.decoder
    assert (await client.delete(f"{application}/v1/conversations/long")).status_code == 404


async def test_a_final_turn_ends_its_conversation(
    application: str, client: httpx.AsyncClient, rng: random.Random
) -> None:
    agent = Agent(client, "last")
    await agent.say(prose(rng, 50), tokens=4)
    agent.messages.append({"role": "user", "content": "bye"})
    reply = await agent.ask(tokens=4, headers={"X-Dynamo-Session-Final": "true"})
    assert reply.status == 200
    await eventually("the conversation has ended", lambda: metric("conserve_conversations") == 0)


async def test_a_conversation_as_the_interface_shows_it(
    application: str, client: httpx.AsyncClient, rng: random.Random
) -> None:
    """`GET /v1/conversations/{id}`: phase, turns, tokens, decoder, age, last use."""
    agent = Agent(client, "shown")
    reply = await agent.say(prose(rng, 200))
    shown = (await client.get(application + "/v1/conversations/shown")).json()
    assert shown["phase"] == "acting"
    assert shown["turns"] == 1
    assert shown["decoder"] == reply.decoder
    usage = reply.body["usage"]
    assert shown["held_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert 0 <= shown["idle_s"] <= shown["age_s"] < 60

    agent.messages.append({"role": "user", "content": "go on"})
    running = asyncio.ensure_future(agent.ask(tokens=400))
    url = application + "/v1/conversations/shown"
    await eventually(
        "a running turn shows",
        lambda: httpx.get(url, timeout=30).json()["phase"] == "reasoning",
    )
    await running
    listed = (await client.get(application + "/v1/conversations")).json()
    assert [entry["id"] for entry in listed["data"]] == ["shown"]
    assert (await client.get(application + "/v1/conversations?limit=x")).status_code == 400
