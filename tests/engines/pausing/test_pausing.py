"""Idle conversations give up their room, and come back as if nothing had been."""

import asyncio
import random

import httpx
import pytest

from tests.engines.applications import PAUSING, URL
from tests.engines.client import Agent, Reply, chat, engines, prose
from tests.engines.metrics import metric
from tests.engines.processes import kill, processes
from tests.engines.waiting import eventually

pytestmark = [pytest.mark.anyio, pytest.mark.application(PAUSING, last=True)]


def too_full() -> list[dict[str, object]]:
    return [one for one in engines("decoder") if one["held_tokens"] > one["capacity_tokens"]]


def pauses() -> float:
    return metric("conserve_pauses_total")


async def shown(client: httpx.AsyncClient, application: str, name: str) -> dict[str, object]:
    found: dict[str, object] = (await client.get(f"{application}/v1/conversations/{name}")).json()
    return found


async def phases(client: httpx.AsyncClient, agents: list[Agent]) -> list[object]:
    return [(await shown(client, URL, str(agent.id)))["phase"] for agent in agents]


async def say_at_length(
    client: httpx.AsyncClient, rng: random.Random, name: str, count: int, tokens: int
) -> list[Agent]:
    agents = [Agent(client, f"{name}-{n}") for n in range(count)]
    for agent in agents:
        await agent.say(prose(rng, 850), tokens=tokens)
    return agents


async def park(rng: random.Random, agents: list[Agent]) -> None:
    """Their decoders are half full: this turn leaves its prompt in host memory."""
    for agent in agents:
        await agent.say(prose(rng, 20), tokens=8)


async def comes_back(client: httpx.AsyncClient, agent: Agent) -> None:
    """Its prompt is loaded, all whole chunks of what was parked, and its answer is the same."""
    again = await agent.say("go on", tokens=24)
    assert agent.stats[2]["lmcache_tokens"] == agent.stats[1]["prompt_tokens"] // 128 * 128
    agent.messages.pop()
    await answered_alike(client, agent, again)


async def test_chats_that_are_over_keep_nobody_waiting(
    application: str, client: httpx.AsyncClient, rng: random.Random
) -> None:
    """Ninety of one turn have over three times what the decoders hold; then comes another."""
    before = pauses()
    agents = [Agent(client, f"chat-{n}") for n in range(90)]
    for first in range(0, len(agents), 6):
        await asyncio.gather(
            *(agent.say(prose(rng, 250), tokens=4) for agent in agents[first : first + 6])
        )
    assert sum(agent.stats[0]["prompt_tokens"] for agent in agents) > 20_000
    for_room = metric("conserve_pauses_total", reason="room")
    await Agent(client, "next").say(prose(rng, 1500), tokens=4)
    assert metric("conserve_pauses_total", reason="room") > for_room
    assert pauses() > before + 60
    assert too_full() == []
    paused = metric("conserve_conversations", phase="paused")
    assert 60 < paused < 90
    # Where all came within seconds, lengths and chunks decide who goes, more than who was first.
    found = await phases(client, agents)
    assert found.count("paused") == paused
    gone = agents[found.index("paused")]
    # Of each, whose turn comes again, the history is found; its prompt is in host memory yet.
    prefills = metric("conserve_cold_prefills_total")
    reloaded = metric("conserve_restores_total", where="reloaded")
    gone.messages.append({"role": "user", "content": "and then?"})
    again = await gone.ask(tokens=24)
    assert (again.status, again.conversation) == (200, gone.id)
    assert metric("conserve_cold_prefills_total") == prefills
    assert metric("conserve_restores_total", where="reloaded") == reloaded + 1
    back = await shown(client, application, gone.id)
    assert (back["phase"], back["turns"]) == ("acting", 2)
    await answered_alike(client, gone, again)


async def answered_alike(client: httpx.AsyncClient, agent: Agent, again: Reply) -> None:
    """The answer is the one that it would have had, with nothing of it kept anywhere."""
    fresh = await chat(client, agent.messages, f"fresh-{agent.id}", cache_salt=f"salt-{agent.id}")
    assert fresh.content == again.content
    await client.delete(f"{URL}/v1/conversations/fresh-{agent.id}")


async def on_one_decoder(
    client: httpx.AsyncClient, rng: random.Random, agents: list[Agent], words: int
) -> list[Agent]:
    """Half of the agents, all on one decoder; the other has nothing."""
    for agent in agents:
        await agent.say(prose(rng, words), tokens=8)
    decoder = agents[0].replies[0].decoder
    stay = [agent for agent in agents if agent.replies[0].decoder == decoder]
    for agent in agents:
        if agent not in stay:
            await client.delete(f"{URL}/v1/conversations/{agent.id}")
    assert 2 * len(stay) == len(agents)
    return stay


async def test_conversations_that_outgrow_their_decoder_move_to_one_with_room(
    application: str, client: httpx.AsyncClient, rng: random.Random
) -> None:
    """Five grow on one decoder to far more than it holds; its neighbour has nothing."""
    stay = await on_one_decoder(client, rng, [Agent(client, f"grows-{n}") for n in range(10)], 200)
    for _ in range(4):
        for agent in stay:
            await agent.say(prose(rng, 210), tokens=8)
        await eventually("it is relieved", lambda: too_full() == [], 2)
    decoders = {engine["id"]: engine["capacity_tokens"] for engine in engines("decoder")}
    assert sum(agent.stats[-1]["prompt_tokens"] for agent in stay) > 1.6 * min(decoders.values())
    assert metric("conserve_pauses_total", reason="mark") > 0
    assert sum(agent.stats[-1]["lmcache_tokens"] for agent in stay) > 0
    assert {agent.replies[-1].decoder for agent in stay} == set(decoders)


async def test_who_is_back_before_the_engine_needs_the_room_finds_it(
    application: str, client: httpx.AsyncClient, rng: random.Random
) -> None:
    """It was paused for one that needed a little more room than there was, and ended soon."""
    stay = await on_one_decoder(client, rng, [Agent(client, f"pair-{n}") for n in range(6)], 850)
    await stay[0].say(prose(rng, 600), tokens=4)
    await eventually("it is relieved", lambda: too_full() == [], 2)
    found = await phases(client, stay)
    assert found.count("paused") == 1
    assert found[0] != "paused"
    await client.delete(f"{application}/v1/conversations/{stay[0].id}")
    prefills = metric("conserve_cold_prefills_total")
    kept = metric("conserve_restores_total", where="kept")
    back = stay[found.index("paused")]
    await back.say("go on", tokens=4)
    # Its decoder goes on with what it has: all but the end of it.
    assert metric("conserve_restores_total", where="kept") == kept + 1
    assert metric("conserve_cold_prefills_total") == prefills
    assert back.stats[1]["decoder_cached_tokens"] > 0.7 * back.stats[0]["prompt_tokens"]
    assert back.replies[1].decoder == back.replies[0].decoder


async def test_who_is_parked_makes_room_at_once_and_comes_back_without_a_prefill(
    application: str, client: httpx.AsyncClient, rng: random.Random
) -> None:
    """Agents that work, on decoders that fill up; others come, and need all of the room."""
    agents = await say_at_length(client, rng, "works", 4, tokens=8)
    parked = metric("conserve_parked_tokens")
    await park(rng, agents)
    held = sum(agent.stats[-1]["prompt_tokens"] for agent in agents)
    assert metric("conserve_parked_tokens") >= parked + 0.02 * held
    began = metric("conserve_queue_wait_seconds_count")
    others = await say_at_length(client, rng, "comes", 8, tokens=4)
    assert await phases(client, agents) == ["paused"] * len(agents)
    assert metric("conserve_queue_wait_seconds_count") == began + len(others)
    for agent in others:
        await client.delete(f"{application}/v1/conversations/{agent.id}")
    prefills = metric("conserve_cold_prefills_total")
    reloaded = metric("conserve_restores_total", where="reloaded")
    for agent in agents:
        await comes_back(client, agent)
        events = (await shown(client, application, str(agent.id)))["events"]
        assert isinstance(events, list)
        happened = [one for one in events if one["kind"] in ("park", "pause", "restore")]
        kinds = [one["kind"] for one in happened]
        assert kinds[kinds.index("pause") - 1 :][:3] == ["park", "pause", "restore"]
        assert happened[kinds.index("restore")]["where"] == "reloaded"
        prefills += 1  # Of the one that answers alike.
    assert metric("conserve_restores_total", where="reloaded") == reloaded + len(agents)
    assert metric("conserve_cold_prefills_total") == prefills
    for term in ("decode", "prefill", "unused", "caching"):
        assert metric("conserve_cost_token_seconds_total", term=term), term


async def test_a_paused_history_is_brought_back_when_its_tool_has_ended(
    application: str, client: httpx.AsyncClient, rng: random.Random
) -> None:
    """Its turn finds its KV on the decoder; one whose turn does not come is paused again."""
    agents = await say_at_length(client, rng, "tool", 4, tokens=8)
    await park(rng, agents)
    # Whichever engine each goes to, neither has anything left of those before.
    others = await say_at_length(client, rng, "needs", 14, tokens=4)
    assert await phases(client, agents) == ["paused"] * len(agents)
    for agent in others:
        await client.delete(f"{application}/v1/conversations/{agent.id}")

    def outcomes() -> list[float]:
        return [metric("conserve_prefetch_total", outcome=one) for one in ("used", "late")]

    async def ends(agent: Agent) -> None:
        report = {"event": "end", "tool": "make"}
        told = await client.post(f"{application}/v1/conversations/{agent.id}/tools", json=report)
        assert told.status_code == 200, told.text

    wrong = agents.pop()
    await ends(wrong)
    assert (await phases(client, [wrong])) == ["acting"]
    dropped = metric("conserve_prefetch_total", outcome="dropped")
    await eventually(
        "its room is given back",
        lambda: metric("conserve_prefetch_total", outcome="dropped") == dropped + 1,
        20,
    )
    assert (await phases(client, [wrong])) == ["paused"]
    # A turn may come before the load has ended, on a machine that has much to do.
    for wait_s, agent in zip((1.0, 2.0, 4.0), agents, strict=True):
        used, late = outcomes()
        await ends(agent)
        await asyncio.sleep(wait_s)
        again = await agent.say("go on", tokens=24)
        assert sum(outcomes()) == used + late + 1
        if outcomes()[0] > used:
            break
    assert outcomes()[0] == used + 1
    assert again.decoder == agent.replies[-2].decoder
    whole_chunks = agent.stats[1]["prompt_tokens"] // 128 * 128
    assert agent.stats[2]["decoder_cached_tokens"] >= whole_chunks
    assert agent.stats[2]["lmcache_tokens"] == 0
    assert "before the turn" in str((await shown(client, application, str(agent.id)))["events"])
    agent.messages.pop()
    await answered_alike(client, agent, again)


async def test_a_new_table_knows_what_is_parked(
    application: str, client: httpx.AsyncClient, rng: random.Random
) -> None:
    """Agents were parked, and paused for others, when the table's process was killed."""
    agents = await say_at_length(client, rng, "stays", 4, tokens=8)
    await park(rng, agents)
    others = await say_at_length(client, rng, "takes", 8, tokens=4)
    assert "paused" in await phases(client, agents)
    (table,) = processes("ray::TableActor")
    kill(table.pid)

    def knows() -> bool:
        # What conversations before these have left in host memory, no decoder holds any more.
        return metric("conserve_parked_tokens") >= len(agents) * 850

    await eventually("decoders have told a new table", knows, 30)
    # By their decoders they are there; but there is no room for all, and these are lost to them.
    await eventually("decoders are relieved", lambda: too_full() == [], 10)
    for agent in others:
        await client.delete(f"{application}/v1/conversations/{agent.id}")
    found = await phases(client, agents)
    paused = [agent for agent, phase in zip(agents, found, strict=True) if phase == "paused"]
    assert paused
    for agent in paused:
        await comes_back(client, agent)
    assert metric("conserve_restores_total", where="reloaded") == len(paused)
