"""Later turns go straight to their decoder, and the table knows all the same."""

import asyncio
import random

import httpx
import pytest

from tests.engines.applications import MAIN, URL
from tests.engines.client import Agent, chat, prose
from tests.engines.metrics import metric
from tests.engines.processes import kill, processes

pytestmark = [pytest.mark.anyio, pytest.mark.application(MAIN)]


def direct() -> float:
    return metric("conserve_later_turns_total", way="direct")


def asked() -> float:
    return metric("conserve_later_turns_total", way="asked")


@pytest.mark.parametrize("name", ["straight", None])
async def test_later_turns_ask_nobody(
    application: str, client: httpx.AsyncClient, rng: random.Random, name: str | None
) -> None:
    before = direct(), asked()
    agents = [Agent(client, None if name is None else f"{name}-{n}") for n in range(2)]
    for stream in (False, True, True, False):
        said = (agent.say(prose(rng, 150), tokens=8, stream=stream) for agent in agents)
        await asyncio.gather(*said)
    assert (direct(), asked()) == (before[0] + 6, before[1])
    for agent in agents:
        assert len({(one.conversation, one.decoder) for one in agent.replies}) == 1
        shown = (await client.get(f"{URL}/v1/conversations/{agent.replies[0].conversation}")).json()
        assert shown["turns"] == 4
        assert shown["phase"] == "acting"
        # All but what was appended was there.
        assert agent.stats[-1]["decoder_cached_tokens"] > agent.stats[-2]["prompt_tokens"] - 128


async def test_completions_of_a_conversation_ask_nobody(
    application: str, client: httpx.AsyncClient, rng: random.Random
) -> None:
    before = direct(), asked()
    words, decoders = prose(rng, 300), set()
    for _ in range(4):
        body = {"prompt": words, "max_tokens": 4, "temperature": 0, "conversation_id": "completed"}
        response = await client.post(f"{URL}/v1/completions", json=body)
        assert response.status_code == 200, response.text
        assert response.headers["x-conversation-id"] == "completed"
        decoders.add(response.headers["x-conserve-decoder"])
        words += response.json()["choices"][0]["text"] + prose(rng, 30)
    assert (direct(), asked()) == (before[0] + 3, before[1])
    assert len(decoders) == 1
    shown = (await client.get(f"{URL}/v1/conversations/completed")).json()
    assert (shown["turns"], shown["phase"]) == (4, "acting")


async def test_what_has_ended_is_begun_anew(
    application: str, client: httpx.AsyncClient, rng: random.Random
) -> None:
    agent = Agent(client, "ended")
    for _ in range(2):
        await agent.say(prose(rng, 300), tokens=8)
    for number in range(3):
        before = direct(), asked()
        assert (await client.delete(f"{URL}/v1/conversations/ended")).status_code == 200
        # At once, with the history that is there yet.
        await agent.say(prose(rng, 30), tokens=8)
        assert (direct(), asked()) == before, number
        shown = (await client.get(f"{URL}/v1/conversations/ended")).json()
        assert shown["turns"] == 1


async def test_two_at_a_time_are_two_histories(
    application: str, client: httpx.AsyncClient, rng: random.Random
) -> None:
    agent = Agent(client, "twofold")
    for _ in range(2):
        await agent.say(prose(rng, 150), tokens=8)
    began = asyncio.Event()
    more = [*agent.messages, {"role": "user", "content": "a long story"}]
    long = asyncio.ensure_future(
        chat(client, more, "twofold", tokens=200, stream=True, began=began)
    )
    await began.wait()
    before = direct()
    beside = await chat(client, more, "twofold", tokens=8)
    assert beside.status == 200
    assert (await long).status == 200
    assert direct() == before
    shown = (await client.get(f"{URL}/v1/conversations/twofold")).json()
    assert shown["histories_total"] == 2
    assert shown["turns"] == 4


@pytest.mark.parametrize("during", [False, True])
async def test_a_table_that_dies_is_told_of_them(
    application: str, client: httpx.AsyncClient, rng: random.Random, during: bool
) -> None:
    agent = Agent(client, f"survives-{during}")
    for _ in range(2):
        await agent.say(prose(rng, 150), tokens=8)
    (table,) = processes("ray::TableActor")
    if during:
        began = asyncio.Event()
        agent.messages.append({"role": "user", "content": "a long story"})
        story = asyncio.ensure_future(agent.ask(tokens=300, stream=True, began=began))
        await began.wait()
        kill(table.pid)
        reply = await story
        assert reply.status == 200
        agent.messages.append({"role": "assistant", "content": reply.content})
    else:
        kill(table.pid)
    await agent.say(prose(rng, 30), tokens=8)
    shown = (await client.get(f"{URL}/v1/conversations/{agent.id}")).json()
    assert shown["turns"] == 3 + during
    assert len(shown["histories"]) == 1
    assert {one.decoder for one in agent.replies} == {agent.replies[0].decoder}
    # And then they go straight again.
    await agent.say(prose(rng, 30), tokens=8)
    before = direct()
    await agent.say(prose(rng, 30), tokens=8)
    assert direct() == before + 1
