"""Replicas come and go with the load, on real engines, and no turn suffers from it."""

import asyncio
import random
import time

import httpx
import pytest

from tests.engines.applications import DRAIN_S, SCALING
from tests.engines.client import Agent, engines, prose
from tests.engines.metrics import metric
from tests.engines.waiting import eventually

# A decoder has room for 3,072 tokens.
FIRST = 600
START_S = 900.0


def replicas(kind: str, role: str) -> float:
    return metric(f"conserve_{kind}", role=role)


async def keep_talking(
    agent: Agent,
    rng: random.Random,
    stop: asyncio.Event,
    pause_s: float,
    answered_s: list[float] | None = None,
) -> None:
    """Turn after turn until told to stop; fails with the first turn that fails.

    Args:
        answered_s: when each answer was whole is appended to it.
    """
    while not stop.is_set():
        await agent.say(prose(rng, 5), tokens=4)
        if answered_s is not None:
            answered_s.append(time.monotonic())
        await asyncio.sleep(pause_s)


@pytest.mark.application(SCALING)
async def test_a_ramp_of_conversations_makes_three_decoders_and_its_end_one(
    application: str, client: httpx.AsyncClient, rng: random.Random
) -> None:
    """1, 3, 1: no failed turn, and no conversation moves until its decoder's time is over."""
    assert replicas("replicas", "decoder") == 1
    agents = [Agent(client, f"ramp-{number}") for number in range(8)]
    stops = [asyncio.Event() for _ in agents]

    async def live(number: int) -> None:
        await agents[number].say(prose(rng, FIRST), tokens=4)
        # Engines take minutes to start, and its context is short.
        await keep_talking(agents[number], rng, stops[number], 8.0)

    lives = []
    for number in range(len(agents)):
        lives.append(asyncio.create_task(live(number)))
        await asyncio.sleep(2)
    await eventually("three decoders serve", lambda: replicas("replicas", "decoder") == 3, START_S)
    # Those that came first are on the first decoder; some more for the new ones.
    late = [Agent(client, f"late-{number}") for number in range(2)]
    for agent in late:
        await agent.say(prose(rng, FIRST), tokens=4)
    stop_late = asyncio.Event()
    answered_s: dict[str, list[float]] = {agent.id or "": [0.0] for agent in late}
    late_lives = [
        asyncio.create_task(keep_talking(agent, rng, stop_late, 2.0, answered_s[agent.id or ""]))
        for agent in late
    ]
    for stop in stops:
        stop.set()
    await asyncio.gather(*lives)
    assert not any(task.done() for task in late_lives)
    all_stay_until_s = time.monotonic()
    for agent in agents:
        await client.delete(f"{application}/v1/conversations/{agent.id}")

    await eventually(
        "one decoder is wanted", lambda: replicas("wanted_replicas", "decoder") == 1, 120
    )
    await eventually("two leave, or have left", lambda: replicas("replicas", "decoder") == 1, 60)
    leaving = {engine["id"] for engine in engines("decoder") if engine["leaving"]}
    outlasting = {agent.id or "": agent for agent in late if agent.replies[-1].decoder in leaving}
    assert outlasting, "no conversation was on a decoder that leaves: the test tests nothing"
    turns = {name: len(agent.replies) for name, agent in outlasting.items()}

    # It goes on where it was, turn after turn, until its decoder's time is over.
    await eventually(
        "the others have left",
        lambda: any(task.done() for task in late_lives) or len(engines("decoder")) == 1,
        DRAIN_S + 120,
    )
    await eventually(
        "each has gone on elsewhere",
        lambda: metric("conserve_moves_total") == len(outlasting),
    )
    assert not any(task.done() for task in late_lives)
    stop_late.set()
    await asyncio.gather(*late_lives)
    for name, agent in outlasting.items():
        here = [reply.decoder == agent.replies[0].decoder for reply in agent.replies]
        moved = here.index(False)
        assert not any(here[moved:])
        assert moved > turns[name] + 1
        assert answered_s[name][moved] > all_stay_until_s + DRAIN_S
        # Prefilled again, and handed over again; from then on it is at home there.
        assert agent.stats[moved]["lmcache_tokens"] > 0
        assert all(stats["lmcache_tokens"] == 0 for stats in agent.stats[moved + 1 :])
    for agent in late:
        if agent.id not in outlasting:
            assert len({reply.decoder for reply in agent.replies}) == 1
        await client.delete(f"{application}/v1/conversations/{agent.id}")
    assert metric("conserve_engines_lost_total") == 0
    assert metric("conserve_turns_total", outcome="failed") == 0
    assert metric("conserve_turns_total", outcome="refused") == 0
    answered = Agent(client, "after")
    await answered.say(prose(rng, 50), tokens=4)
