"""The ConServe paper's system, which is shown images too, and one engine that does everything."""

import asyncio
import random

import httpx
import pytest

from conserve.apis import CHAT, MESSAGES, RESPONSES
from tests.engines.applications import ONE, PAPER
from tests.engines.client import Agent, engines, last_turn, prose
from tests.engines.metrics import metric
from tests.engines.vision.turns import ask, body_of, encoded, new_image

pytestmark = pytest.mark.full


@pytest.mark.application(PAPER)
async def test_as_in_the_paper_each_conversation_is_handed_over_once_and_never_moves(
    application: str, client: httpx.AsyncClient, rng: random.Random
) -> None:
    agents = [Agent(client) for _ in range(8)]
    for _ in range(3):
        await asyncio.gather(*(agent.say(prose(rng, 150), tokens=8) for agent in agents))
    assert metric("conserve_handoffs_total") == len(agents)
    assert metric("conserve_moves_total") == metric("conserve_pauses_total") == 0
    for agent in agents:
        assert len({reply.decoder for reply in agent.replies}) == 1
        assert [turn["lmcache_tokens"] > 0 for turn in agent.stats] == [True, False, False]
        assert agent.stats[2]["decoder_cached_tokens"] > agent.stats[0]["prompt_tokens"]


@pytest.mark.application(PAPER)
@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_an_image_is_handed_over_and_encoded_once_by_every_api(
    application: str, client: httpx.AsyncClient, rng: random.Random, path: str
) -> None:
    """`make test-vision` has the rest."""
    image, answers = new_image(rng), []
    # The second prompt ends in its image.
    texts, before = (prose(rng, 150), prose(rng, 150)), encoded()[0]
    for behind, stream in ((texts[1], False), (texts[1], True), ("", True), ("", False)):
        body = body_of(path, (texts[0], behind), image)
        headers, answer, _ = await ask(client, application, path, body, stream=stream)
        answers.append(answer)
        stats = await last_turn(client, headers["x-conversation-id"])
        assert stats["lmcache_tokens"] + stats["decoder_cached_tokens"] >= 128
    assert encoded()[0] == before + 1
    assert answers[0] == answers[1]
    assert answers[2] == answers[3]


@pytest.mark.application(ONE)
async def test_one_engine_pauses_and_parks_what_it_has_no_room_for(
    application: str, client: httpx.AsyncClient, rng: random.Random
) -> None:
    """Twelve agents' histories are twice what the engine holds; none is refused or lost."""
    (engine,) = engines("decoder")
    assert engines("prefiller") == []
    agents = [Agent(client, f"one-{number}") for number in range(12)]
    for _ in range(4):
        for first in range(0, len(agents), 4):
            group = agents[first : first + 4]
            await asyncio.gather(*(agent.say(prose(rng, 110), tokens=8) for agent in group))
    held = sum(agent.stats[-1]["prompt_tokens"] for agent in agents)
    assert held > 1.9 * int(str(engine["capacity_tokens"]))
    assert metric("conserve_pauses_total", reason="room") > 0
    assert metric("conserve_restores_total", where="reloaded") > 0
    # Whatever was paused is found, in the engine or in host memory: whole blocks of it.
    for agent in agents:
        for before, after in zip(agent.stats, agent.stats[1:], strict=False):
            found = after["decoder_cached_tokens"] + after["lmcache_tokens"]
            assert found >= before["prompt_tokens"] // 128 * 128
