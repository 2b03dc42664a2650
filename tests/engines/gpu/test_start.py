"""A prefiller and a decoder on one GPU: that they start, and what is known of the GPU."""

import asyncio
import random
import time

import httpx
import pytest

from tests.engines.applications import GPU
from tests.engines.client import Agent, engines, prose
from tests.engines.gpu.card import NEEDS_GPU, card, energy_j, seen, used_bytes
from tests.engines.metrics import metric
from tests.engines.waiting import eventually

pytestmark = [NEEDS_GPU, pytest.mark.anyio, pytest.mark.application(GPU)]


def test_a_prefiller_and_a_decoder_start_on_one_card(application: str) -> None:
    """Under the name that NVML has for it, too."""
    found = {engine["role"]: engine for engine in engines()}
    assert set(found) == {"prefiller", "decoder"}
    assert [engine["gpus"] for engine in found.values()] == [[card().uuid]] * 2
    for role, engine in found.items():
        seen.info("%s: KV for %d tokens", role, engine["capacity_tokens"])
    seen.info("GPU: %.1f of %.1f GiB taken", used_bytes() / 2**30, card().memory_bytes / 2**30)


async def test_a_conversation_is_handed_over_once_and_stays(
    application: str, client: httpx.AsyncClient
) -> None:
    """As on CPUs, through the router: all whole chunks of turn 1 from LMCache, later ones none."""
    rng = random.Random(0)
    agent = Agent(client, "on-one-card")
    for words in (3000, 200, 200):
        await agent.say(prose(rng, words), tokens=16)
    first, *later = agent.stats
    assert first["lmcache_tokens"] == (first["prompt_tokens"] - 1) // 256 * 256
    assert first["decoder_cached_tokens"] == 0
    assert [turn["lmcache_tokens"] for turn in later] == [0, 0]
    assert all(turn["decoder_cached_tokens"] > first["prompt_tokens"] - 256 for turn in later)


async def test_joules_are_the_cards_own(application: str, client: httpx.AsyncClient) -> None:
    """What `/metrics` has counted for both engines is what NVML's counter has moved by."""
    rng = random.Random(1)
    await eventually("energy is counted", lambda: metric("conserve_gpu_energy_joules_total") > 0)
    counted_j, moved_j = metric("conserve_gpu_energy_joules_total"), energy_j()
    deadline_s = time.monotonic() + 20
    while time.monotonic() < deadline_s:
        agents = [Agent(client, f"joules-{rng.random()}") for _ in range(4)]
        await asyncio.gather(*(agent.say(prose(rng, 2000), tokens=64) for agent in agents))
    await asyncio.sleep(3)  # Readings, beats and scrapes are a second apart each.
    counted_j = metric("conserve_gpu_energy_joules_total") - counted_j
    moved_j = energy_j() - moved_j
    seen.info("joules in some 20 s: %.0f counted, %.0f by NVML", counted_j, moved_j)
    assert counted_j == pytest.approx(moved_j, rel=0.2)
