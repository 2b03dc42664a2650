"""Encodes beside answers and prefills, with the decoder's SMs divided by stage."""

import asyncio
import random
from typing import Any

import httpx
import pytest

from tests.acceptance.gpu.conftest import lone_on_gpu
from tests.engines.applications import GPU_STAGES
from tests.engines.client import Agent, Message, chat, prose
from tests.engines.metrics import metric
from tests.engines.stage import Stage
from tests.engines.streams import Put, put_gaps
from tests.engines.vision.turns import new_image, said

pytestmark = [pytest.mark.step("stages"), pytest.mark.anyio, pytest.mark.application(GPU_STAGES)]

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
def answers_alone(stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[str]]:
    """A lone engine's answers to each agent; it runs before the application, as `alone` does."""
    with lone_on_gpu(stage, tmp_path_factory.mktemp("lone"), GPU_STAGES) as url:
        return asyncio.run(_answered(url))


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
    messages = [{"role": "user", "content": prose(random.Random(seed), 30)}]
    return (await chat(client, messages, tokens=_STORY_TOKENS, stream=True)).gaps_ms


async def test_answers_are_a_lone_engines(
    answers_alone: dict[int, list[str]], application: str, client: httpx.AsyncClient, figure: Put
) -> None:
    """Agents that are shown images, beside two long answers; then the gaps without them."""
    before = metric("conserve_engine_lane_prefills_total", outcome="done")
    agents = [Agent(client) for _ in range(_SEERS)]
    stories = [asyncio.ensure_future(_gaps_ms(client, f"story {one}")) for one in range(2)]
    await asyncio.sleep(0.5)

    async def sees(seer: int) -> None:
        for content in _shown(seer):
            await agents[seer].say(content, tokens=_TOKENS, stream=True)

    seeing, borders = asyncio.gather(*map(sees, range(_SEERS))), set()
    while not seeing.done():
        borders.add(f"{metric('conserve_engine_decode_sms'):g}")
        await asyncio.sleep(0.1)
    await seeing
    figure("SMs that decoding had, by its beats once a second", ", ".join(sorted(borders)))
    for seer, agent in enumerate(agents):
        assert [reply.content for reply in agent.replies] == answers_alone[seer]
        assert sum(turn["encoded_images"] for turn in agent.stats) == _TURNS
    assert metric("conserve_engine_lane_prefills_total", outcome="done") > before
    assert metric("conserve_engine_lane_prefills_total", outcome="failed") == 0
    beside = [gap for story in stories for gap in await story]
    put_gaps(figure, f"beside {_SEERS * _TURNS} images", beside)
    put_gaps(figure, "without images", await _gaps_ms(client, "calm"))
