"""Conversations that are timed."""

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Sequence

import httpx

from conserve_inside.sm_slots.means import mps_runs
from tests.engines.client import Agent, Reply, prose

# The fixture `figure`: name, value, unit.
Put = Callable[..., None]


def put_gaps(figure: Put, where: str, gaps_ms: Sequence[float]) -> None:
    """Put times between tokens on the page."""
    gaps_ms = sorted(gaps_ms)
    middle, p95 = statistics.median(gaps_ms), gaps_ms[int(len(gaps_ms) * 0.95)]
    shown = f"{middle:.1f}, {p95:.1f}, {gaps_ms[-1]:.1f}"
    figure(f"time between tokens, {where}: median, p95, longest", shown, "ms")


async def play(
    client: httpx.AsyncClient, agents: int, words: Sequence[int], tokens: int
) -> list[list[Reply]]:
    """Play agents at the same time: a message of ``words`` words each turn, and short pauses.

    The same numbers give the same conversations, so that applications can be compared.
    """

    async def talk(number: int) -> list[Reply]:
        rng = random.Random(f"agent {number} of {agents}")
        agent = Agent(client, f"{number}-of-{agents}")
        for count in words:
            await agent.say(prose(rng, count), tokens=tokens, stream=True)
            await asyncio.sleep(rng.uniform(0, 0.5))
        return agent.replies

    return await asyncio.gather(*map(talk, range(agents)))


async def compare(client: httpx.AsyncClient, figure: Put, where: str) -> None:
    """Play conversations, put their times on the page."""
    where += f", {'under' if mps_runs() else 'without'} MPS"
    words = (6_000, 300, 300, 300)
    await play(client, 2, words, 128)  # Engines warm up.
    started_s = time.perf_counter()
    played = await play(client, 24, words, 128)
    figure(f"all turns, {where}", time.perf_counter() - started_s, "s")
    for what, turns in (("first", slice(1)), ("later", slice(1, None))):
        first_s = [one.after_s[0] for replies in played for one in replies[turns]]
        figure(f"{what} turns' time to first token, {where}", statistics.median(first_s), "s")
    put_gaps(figure, where, [gap for replies in played for one in replies for gap in one.gaps_ms])
