"""Encodes beside answers and prefills, with the decoder's SMs divided by stage."""

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.engines.applications import GPU_STAGES
from tests.engines.client import Agent, Message, chat, last_turn, prose
from tests.engines.gpu.card import NEEDS_GPU, seen
from tests.engines.lone import LONE_PORT, lone_engine, wait_for_lone
from tests.engines.metrics import metric
from tests.engines.stage import Stage
from tests.engines.vision.turns import new_image, said

pytestmark = [NEEDS_GPU, pytest.mark.anyio, pytest.mark.application(GPU_STAGES)]

_TOKENS = 16
_STORY_TOKENS = 1_500
_TURNS = 3
_SEERS = 4


def _shown(seer: int) -> list[list[dict[str, Any]]]:
    """An agent's messages: each has a text, a new image and a text."""
    rng = random.Random(f"seer {seer}")
    return [
        said((prose(rng, 40), prose(rng, 400)), new_image(rng, pixels=448)) for _ in range(_TURNS)
    ]


@pytest.fixture(scope="module")
def answers_alone(
    stage: Stage, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[int, list[str]]]:
    """A lone engine's answers to each agent; it runs before the application, as `alone` does."""
    stage.clear()
    logs = tmp_path_factory.mktemp("lone")
    engine = lone_engine(logs / "lone.log", stage.model_of(GPU_STAGES), gpu=True)
    try:
        wait_for_lone(engine, logs)
        yield asyncio.run(_answered(f"http://127.0.0.1:{LONE_PORT}"))
    finally:
        engine.stop()


async def _answered(url: str) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    async with httpx.AsyncClient(timeout=120) as client:
        for seer in range(_SEERS):
            messages: list[Message] = []
            found[seer] = []
            for content in _shown(seer):
                messages.append({"role": "user", "content": content})
                reply = await chat(client, messages, tokens=_TOKENS, url=url)
                assert reply.status == 200, reply.body
                messages.append({"role": "assistant", "content": reply.content})
                found[seer].append(reply.content)
    return found


async def _gaps_ms(client: httpx.AsyncClient, seed: str) -> list[float]:
    """Times between a long answer's tokens."""
    body = {
        "model": "conserve-embedded", "max_tokens": _STORY_TOKENS, "temperature": 0, "stream": True,
        "ignore_eos": True,
        "messages": [{"role": "user", "content": prose(random.Random(seed), 30)}],
    }  # fmt: skip
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        lines = answer.aiter_lines()
        at_s = [time.perf_counter() async for line in lines if line.startswith("data: {")]
    return [1e3 * (after - before) for before, after in itertools.pairwise(at_s)]


async def test_answers_are_a_lone_engines(
    answers_alone: dict[int, list[str]], application: str, client: httpx.AsyncClient
) -> None:
    """Agents that are shown images, beside two long answers; then the gaps without them."""
    client.base_url = httpx.URL(application)
    before = metric("conserve_engine_lane_prefills_total", outcome="done")
    agents = [Agent(client) for _ in range(_SEERS)]
    stories = [asyncio.ensure_future(_gaps_ms(client, f"story {one}")) for one in range(2)]
    await asyncio.sleep(0.5)

    async def sees(seer: int) -> None:
        for content in _shown(seer):
            await agents[seer].say(content, tokens=_TOKENS, stream=True)

    await asyncio.gather(*map(sees, range(_SEERS)))
    for seer, agent in enumerate(agents):
        assert [reply.content for reply in agent.replies] == answers_alone[seer]
        assert sum(turn["encoded_images"] for turn in agent.stats) == _TURNS
    assert metric("conserve_engine_lane_prefills_total", outcome="done") > before
    assert metric("conserve_engine_lane_prefills_total", outcome="failed") == 0
    beside = [gap for story in stories for gap in await story]
    calm = await _gaps_ms(client, "calm")
    seen.info(
        "time between tokens beside %d images: p50 %.1f ms, longest %.1f; without %.1f, %.1f",
        _SEERS * _TURNS, statistics.median(beside), max(beside), statistics.median(calm), max(calm),
    )  # fmt: skip


async def test_each_stage_has_its_share_of_the_sms(
    application: str, client: httpx.AsyncClient
) -> None:
    """The border is where the shares of `GPU_STAGES` say, while an image is encoded."""
    rng = random.Random("shares")
    story = asyncio.ensure_future(_gaps_ms(client, "shares"))
    await asyncio.sleep(0.5)
    agent = Agent(client)
    content = [part for _ in range(4) for part in said((prose(rng, 9), ""), new_image(rng, 448))]
    asked = asyncio.ensure_future(agent.say(content, tokens=_TOKENS))
    borders = set()
    while not asked.done():
        borders.add(metric("conserve_engine_decode_sms"))
        await asyncio.sleep(0.1)
    await story
    seen.info("decodes had %s SMs; beats tell it once a second", sorted(borders))
    assert (await last_turn(client, agent.replies[0].conversation))["encoded_images"] == 4
