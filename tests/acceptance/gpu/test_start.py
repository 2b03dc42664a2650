"""Engines on one GPU: that they start, their memory and energy, and what the router adds."""

import asyncio
import random
import statistics
import time
from dataclasses import replace

import httpx
import pytest

from conserve.settings import load
from deployments.gpu_plans import here, plan_on
from hetero.engine_needs import CONTEXT_BYTES
from hetero.gpu_plan import GpuPlan
from tests.acceptance.gpu.card import card, energy_j, used_bytes
from tests.engines.applications import GPU, GPU_ONE, Application
from tests.engines.client import Agent, chat, engines, prose
from tests.engines.metrics import metric
from tests.engines.stage import Stage
from tests.engines.streams import Put
from tests.engines.waiting import eventually

pytestmark = [pytest.mark.anyio, pytest.mark.application(GPU)]

# The tests' own context, which they measure with.
_SLACK_BYTES = 1 << 29


def _put_engines(figure: Put) -> None:
    """They are under the name that NVML has for the GPU."""
    for engine in engines():
        assert engine["gpus"] == [card().uuid]
        figure(f"KV of the {engine['role']}", engine["capacity_tokens"], "tokens")
    figure("memory taken after the start", used_bytes() / 2**30, "GiB")


@pytest.mark.step("one engine")
@pytest.mark.application(GPU_ONE)
async def test_one_engine_keeps_a_conversation(
    application: str, client: httpx.AsyncClient, figure: Put
) -> None:
    _put_engines(figure)
    first, *later = await _turns(client)
    assert all(turn["decoder_cached_tokens"] > first["prompt_tokens"] - 256 for turn in later)


@pytest.mark.step("two engines")
def test_a_prefiller_and_a_decoder_start_on_one_card(application: str, figure: Put) -> None:
    assert {engine["role"] for engine in engines()} == {"prefiller", "decoder"}
    _put_engines(figure)


async def _turns(client: httpx.AsyncClient) -> list[dict[str, int]]:
    rng = random.Random(0)
    agent = Agent(client, "on-one-card")
    for words in (3000, 200, 200):
        await agent.say(prose(rng, words), tokens=16)
    assert agent.stats[0]["decoder_cached_tokens"] == 0
    return agent.stats


def planned(application: Application, model: str) -> GpuPlan:
    """Return the plan on this machine, as `conserve serve --plan` has it before a start."""
    given = dict(one.split("=", 1) for one in application.arguments)
    # The application, which runs, has the host memory that a start would look for.
    node = replace(here(), available_bytes=1 << 40, memory=None)
    return plan_on(load({**given, "model": model}), [node], model_is_here=True)[1]


async def _fill(client: httpx.AsyncClient, url: str) -> None:
    """Send an engine its largest batches of prefills, and as many answers as it decodes at once."""
    sizes = [8_192] * 64 + [100] * 960
    rng = random.Random(url)
    said = [[{"role": "user", "content": prose(rng, size)}] for size in sizes]
    await asyncio.gather(*(chat(client, one, tokens=101, url=url) for one in said))


_ONE = [pytest.mark.step("memory of one"), pytest.mark.application(GPU_ONE)]
_TWO = pytest.mark.step("memory of two")


@pytest.mark.parametrize(
    "chosen", [pytest.param(GPU_ONE, marks=_ONE, id="one"), pytest.param(GPU, marks=_TWO, id="two")]
)
async def test_full_batches_keep_to_the_plan(
    application: str, stage: Stage, client: httpx.AsyncClient, figure: Put, chosen: Application
) -> None:
    """The engines' parts, as planned, and a context of LMCache's server hold it all."""
    plan = planned(chosen, stage.model_of(chosen))
    budget = sum(one.replicas * (one.budget_bytes or 0) for one in plan.engines)
    for one in plan.engines:
        figure(f"planned KV of the {one.role}", one.kv_tokens or "unknown", "tokens")
    seen = [used_bytes()]
    for engine in engines():
        filling = asyncio.ensure_future(_fill(client, engine["url"]))
        while not filling.done():
            seen.append(used_bytes())
            await asyncio.sleep(0.2)
        await filling
    figure("planned for all engines", budget / 2**30, "GiB")
    figure("highest memory taken", max(seen) / 2**30, "GiB")
    assert max(seen) < budget + CONTEXT_BYTES + _SLACK_BYTES


@pytest.mark.step("handoffs")
async def test_a_conversation_is_handed_over_once_and_stays(
    application: str, client: httpx.AsyncClient
) -> None:
    """As on CPUs, through the router: all whole chunks of turn 1 from LMCache, later ones none."""
    first, *later = await _turns(client)
    assert first["lmcache_tokens"] == (first["prompt_tokens"] - 1) // 256 * 256
    assert [turn["lmcache_tokens"] for turn in later] == [0, 0]
    assert all(turn["decoder_cached_tokens"] > first["prompt_tokens"] - 256 for turn in later)


@pytest.mark.step("costs")
async def test_joules_are_the_cards_own(
    application: str, client: httpx.AsyncClient, figure: Put
) -> None:
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
    figure("energy in some 20 s, counted", counted_j, "J")
    figure("energy in some 20 s, by NVML", moved_j, "J")
    assert counted_j == pytest.approx(moved_j, rel=0.2)


@pytest.mark.step("costs")
async def test_through_the_router_against_the_engine_itself(
    application: str, client: httpx.AsyncClient, figure: Put
) -> None:
    """64 streamed tokens of a short prompt, in alternating pairs: the same engine, two doors."""
    (decoder,) = engines("decoder")
    doors = {"ConServe": application, "its engine": decoder["url"]}
    took_ms: dict[str, list[float]] = {name: [] for name in doors}
    for number in range(-3, 30):
        for name in random.Random(number).sample(sorted(doors), 2):
            # Too short for a chunk: nothing is found, nothing is handed over.
            said = [{"role": "user", "content": prose(random.Random(f"{number}{name}"), 100)}]
            answer = await chat(
                client, said, tokens=64, stream=True, url=doors[name], ignore_eos=True
            )
            took_ms[name] += [answer.after_s[-1] * 1e3] * (number >= 0)
    for name, found_ms in took_ms.items():
        figure(f"64 streamed tokens from {name}", statistics.median(found_ms), "ms")
    ratios = [ours / bare for ours, bare in zip(*took_ms.values(), strict=True)]
    figure("ratio of the two, median of pairs", statistics.median(ratios))
