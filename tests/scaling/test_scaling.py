"""Replicas come and go with the load, on real engines, and no turn suffers from it."""

import asyncio
import random
import time

import httpx
import pytest

from tests import harness
from tests.harness import Agent

pytestmark = pytest.mark.anyio

# A decoder has room for 3,072 tokens.
FIRST = 600
START_S = 900.0


def replicas(kind: str, role: str) -> float:
    return harness.metric(f"conserve_{kind}", role=role)


async def keep_talking(
    agent: Agent, rng: random.Random, stop: asyncio.Event, pause_s: float
) -> None:
    """Turn after turn until told to stop; fails with the first turn that fails."""
    while not stop.is_set():
        await agent.say(harness.text(rng, 5), tokens=4)
        await asyncio.sleep(pause_s)


async def test_a_ramp_of_conversations_makes_three_decoders_and_its_end_one(
    scaling_app: str, client: httpx.AsyncClient, rng: random.Random
) -> None:
    """1, 3, 1: no failed turn, and no conversation moved, though two decoders leave."""
    assert replicas("replicas", "decoder") == 1
    agents = [Agent(client, f"ramp-{number}") for number in range(8)]
    stops = [asyncio.Event() for _ in agents]

    async def live(number: int) -> None:
        await agents[number].say(harness.text(rng, FIRST), tokens=4)
        # Engines take minutes to start, and its context is short.
        await keep_talking(agents[number], rng, stops[number], 8.0)

    lives = []
    for number in range(len(agents)):
        lives.append(asyncio.create_task(live(number)))
        await asyncio.sleep(2)
    await harness.eventually(
        "three decoders serve", lambda: replicas("replicas", "decoder") == 3, START_S
    )
    # Those that came first are on the first decoder; some more for the new ones.
    late = [Agent(client, f"late-{number}") for number in range(2)]
    late_stops = [asyncio.Event() for _ in late]
    for agent in late:
        await agent.say(harness.text(rng, FIRST), tokens=4)
    late_lives = [
        asyncio.create_task(keep_talking(agent, rng, stop, 2.0))
        for agent, stop in zip(late, late_stops, strict=True)
    ]
    for stop in stops:
        stop.set()
    await asyncio.gather(*lives)
    assert not any(task.done() for task in late_lives)
    for agent in agents:
        await client.delete(f"{scaling_app}/v1/conversations/{agent.id}")

    await harness.eventually(
        "one decoder is wanted", lambda: replicas("wanted_replicas", "decoder") == 1, 120
    )
    await harness.eventually(
        "two leave, or have left", lambda: replicas("replicas", "decoder") == 1, 60
    )
    leaving = {engine["id"] for engine in harness.engines("decoder") if engine["leaving"]}
    on_leaving = [agent for agent in late if agent.replies[-1].decoder in leaving]
    turns_before = {agent.id: len(agent.replies) for agent in late}
    until_s = time.monotonic() + 15
    while time.monotonic() < until_s:
        assert not any(task.done() for task in late_lives)
        await asyncio.sleep(1)
    for agent in on_leaving:
        # It goes on where it was, turn after turn, for as long as it lives.
        assert agent.replies[-1].decoder in leaving
        assert len(agent.replies) > turns_before[agent.id] + 3
    assert on_leaving, "no conversation was on a decoder that leaves: the test tests nothing"
    for stop in late_stops:
        stop.set()
    await asyncio.gather(*late_lives)
    for agent in late:
        assert len({reply.decoder for reply in agent.replies}) == 1
        await client.delete(f"{scaling_app}/v1/conversations/{agent.id}")
    await harness.eventually(
        "the others have left", lambda: len(harness.engines("decoder")) == 1, 120
    )
    assert harness.metric("conserve_moves_total") == 0
    assert harness.metric("conserve_engines_lost_total") == 0
    assert harness.metric("conserve_turns_total", outcome="failed") == 0
    assert harness.metric("conserve_turns_total", outcome="refused") == 0
    answered = Agent(client, "after")
    await answered.say(harness.text(rng, 50), tokens=4)


async def test_first_prompts_make_a_second_prefiller(
    bursts_app: str, client: httpx.AsyncClient, rng: random.Random
) -> None:
    """On input tokens alone, measured by the profiled curve; nothing fails meanwhile."""
    assert replicas("replicas", "prefiller") == 1
    bursts = 0
    deadline_s = time.monotonic() + START_S
    while replicas("replicas", "prefiller") < 2:
        assert time.monotonic() < deadline_s
        agents = [Agent(client, f"burst-{bursts}-{number}") for number in range(8)]
        bursts += 1
        await asyncio.gather(*(agent.say(harness.text(rng, 5000), tokens=1) for agent in agents))
        for agent in agents:
            await client.delete(f"{bursts_app}/v1/conversations/{agent.id}")
    assert len(harness.engines("prefiller")) == 2
    assert len(harness.engines("decoder")) == 1
    assert harness.metric("conserve_cold_prefills_total") == 8 * bursts
    assert harness.metric("conserve_turns_total", outcome="failed") == 0
