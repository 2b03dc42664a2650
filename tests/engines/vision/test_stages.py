"""Images are encoded and prefilled beside answers, which stay those of an engine without a lane."""

import asyncio
import random
import shutil
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from PIL import Image

from tests.engines.applications import STAGES
from tests.engines.client import Agent, lone_answer, prose
from tests.engines.metrics import metric
from tests.engines.processes import kill
from tests.engines.stage import Stage
from tests.engines.vision.slow import BLUE, FOLDER
from tests.engines.vision.turns import new_image, png, said
from tests.engines.waiting import eventually

pytestmark = [pytest.mark.anyio, pytest.mark.application(STAGES)]

# Room for an answer that goes on while others' images are encoded.
_STORY_TOKENS = 400


@pytest.fixture(autouse=True)
def where_it_is() -> Iterator[None]:
    """Nothing is said yet of where a slow image is."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    yield
    shutil.rmtree(FOLDER, ignore_errors=True)


def _content(rng: random.Random, image: str, words: int = 120) -> list[dict[str, Any]]:
    return said((prose(rng, 20), prose(rng, words)), image)


def _slow_image(rng: random.Random) -> str:
    """An image like no other, since the node remembers those that it has encoded."""
    image = Image.new("RGB", (112, 112), BLUE)
    image.putpixel((rng.randrange(112), rng.randrange(112)), tuple(rng.randbytes(3)))
    return png(image)


async def _telling(client: httpx.AsyncClient, rng: random.Random, count: int = 2) -> list[Any]:
    """Agents, one for each decoder, that answer at length."""
    agents = [Agent(client) for _ in range(count)]
    stories = []
    for agent in agents:
        agent.messages.append({"role": "user", "content": prose(rng, 30)})
        began = asyncio.Event()
        asked = agent.ask(tokens=_STORY_TOKENS, stream=True, began=began)
        stories.append(asyncio.ensure_future(asked))
        await began.wait()
    return list(zip(agents, stories, strict=True))


async def _reach(stage: str) -> int:
    """Wait until the lane has a slow image in a stage; returns that engine's process."""
    await eventually(f"a slow image {stage}", lambda: (FOLDER / stage).exists())
    return int((FOLDER / stage).read_text())


async def _require_answers(client: httpx.AsyncClient, telling: list[Any]) -> None:
    for agent, story in telling:
        reply = await story
        assert reply.status == 200
        assert reply.content == await lone_answer(client, agent.messages, _STORY_TOKENS)


def _lanes_are_empty() -> bool:
    return metric("conserve_engine_lane_running") == metric("conserve_engine_lane_waiting") == 0


async def test_turns_with_images_beside_answers(
    application: str, stage: Stage, client: httpx.AsyncClient, rng: random.Random
) -> None:
    stage.wait_for_lone()
    done = metric("conserve_engine_lane_prefills_total", outcome="done")
    telling = await _telling(client, rng)
    seers = [Agent(client) for _ in range(3)]
    shared = new_image(rng)

    async def sees(agent: Agent) -> None:
        await agent.say(_content(rng, shared), tokens=8)
        await agent.say(prose(rng, 40), tokens=8)
        two = [*_content(rng, new_image(rng)), *_content(rng, shared)]
        await agent.say(two, tokens=8)

    await asyncio.gather(*map(sees, seers))
    await _require_answers(client, telling)
    for agent in seers:
        for turn in range(3):
            asked, answer = agent.messages[: 2 * turn + 1], agent.messages[2 * turn + 1]
            assert await lone_answer(client, asked, 8) == answer["content"], turn
    # What all are shown first is encoded once a node, and each one's own picture once.
    stats = [turn for agent in seers for turn in agent.stats]
    assert 4 <= sum(turn["encoded_images"] for turn in stats) <= 5
    # Turns say how long their stages took, and all of them count.
    for stage_s in ("encode_wait_s", "encode_s", "prefill_s", "decode_s"):
        assert sum(turn[stage_s] for turn in stats) > 0, stage_s
        assert metric("conserve_stage_seconds_count", stage=stage_s.removesuffix("_s")) > 0
    assert metric("conserve_engine_lane_prefills_total", outcome="done") > done
    assert metric("conserve_engine_lane_prefills_total", outcome="failed") == 0
    await eventually("the lanes are empty", _lanes_are_empty)


@pytest.mark.parametrize("where", ["encodes", "prefills"])
async def test_an_engine_is_killed_in_the_middle(
    application: str, stage: Stage, client: httpx.AsyncClient, rng: random.Random, where: str
) -> None:
    stage.wait_for_lone()
    telling = await _telling(client, rng)
    agent = Agent(client)
    content = _content(rng, _slow_image(rng), 900)
    asked = asyncio.ensure_future(agent.say(content, tokens=8))
    kill(await _reach(where))
    reply = await asked
    assert reply.content == await lone_answer(client, agent.messages[:1], 8)
    await _require_answers(client, telling)
    stage.wait_until_whole()
    await agent.say(_content(rng, new_image(rng)), tokens=8)
    assert agent.replies[1].content == await lone_answer(client, agent.messages[:3], 8)


@pytest.mark.parametrize("where", ["encodes", "prefills"])
async def test_a_client_leaves_in_the_middle(
    application: str, stage: Stage, client: httpx.AsyncClient, rng: random.Random, where: str
) -> None:
    stage.wait_for_lone()
    telling = await _telling(client, rng)
    leaves, stays = Agent(client), Agent(client)
    leaves.messages.append({"role": "user", "content": _content(rng, _slow_image(rng), 900)})
    asked = asyncio.ensure_future(leaves.ask(tokens=8, stream=True))
    await _reach(where)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    await stays.say(_content(rng, new_image(rng)), tokens=8)
    assert stays.replies[0].content == await lone_answer(client, stays.messages[:1], 8)
    await _require_answers(client, telling)
    await eventually("the lanes are empty", _lanes_are_empty)
    # The conversation goes on.
    await leaves.say(prose(rng, 10), tokens=8)
    assert leaves.replies[0].content == await lone_answer(client, leaves.messages[:2], 8)
