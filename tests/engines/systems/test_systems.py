"""Each paper's system, ConServe's with images too, and one engine that does everything."""

import asyncio
import random
from typing import Any

import httpx
import pytest

from conserve.apis import CHAT, MESSAGES, RESPONSES
from tests.engines.applications import AGENTSERVE, MARS, NOVA, ONE, PAPER, URL, Application
from tests.engines.client import Agent, chat, engines, last_turn, prose
from tests.engines.metrics import exposed, metric
from tests.engines.vision.turns import ask, body_of, encoded, new_image
from tests.engines.waiting import eventually

pytestmark = pytest.mark.full


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


def _has(application: Application, **mechanisms: int) -> Any:
    """A system's mechanisms; no ``levels``: vLLM's own scheduler. Held calls have one."""
    return pytest.param(mechanisms, marks=pytest.mark.application(application), id=application.name)


_SHOWN_BY = {
    "keeps": "conserve_engine_pinned_blocks",
    "lane": "conserve_engine_lane_computed_tokens_total",
    "cuts": "conserve_engine_cut_total",
}


@pytest.mark.parametrize(
    "has",
    [
        _has(PAPER, handoffs=5),
        _has(ONE, pauses=1),
        _has(MARS, levels=5, keeps=1),
        _has(AGENTSERVE, levels=1, lane=1, cuts=1),
        _has(NOVA, levels=1, lane=1),
    ],
)
async def test_each_papers_system_has_its_mechanisms_and_no_others(
    application: str, client: httpx.AsyncClient, rng: random.Random, has: dict[str, int]
) -> None:
    handoffs, pauses = metric("conserve_handoffs_total"), metric("conserve_pauses_total")
    agents = [Agent(client) for _ in range(5)]
    # Together more than ThunderAgent's engine holds.
    for _ in range(2):
        await asyncio.gather(*(agent.say(prose(rng, 400), tokens=8) for agent in agents))
    assert bool(engines("prefiller")) == ("handoffs" in has)
    assert (metric("conserve_pauses_total") > pauses) == ("pauses" in has)
    if "handoffs" in has:
        # As in the paper, each conversation is handed over once, and never moves.
        assert metric("conserve_handoffs_total") == handoffs + has["handoffs"]
        assert metric("conserve_moves_total") == 0
        for agent in agents:
            assert len({reply.decoder for reply in agent.replies}) == 1
            assert [turn["lmcache_tokens"] > 0 for turn in agent.stats] == [True, False]
            assert agent.stats[1]["decoder_cached_tokens"] > agent.stats[0]["prompt_tokens"] - 128
    level = "conserve_engine_waiting{"
    await eventually("it has its levels", lambda: exposed(URL).count(level) == has.get("levels", 0))
    for _ in range(3 if "levels" in has else 0):
        # Both begin while nothing decodes. The second is prefilled beside the first one's answer.
        both = [Agent(client).say(prose(rng, n), tokens=90) for n in (1_800, 1_700)]
        await asyncio.gather(*both)
        began = asyncio.Event()
        asked = [[{"role": "user", "content": prose(rng, n)}] for n in (9, 1_200)]
        answer = asyncio.ensure_future(chat(client, asked[0], tokens=400, stream=True, began=began))
        await began.wait()
        await chat(client, asked[1], tokens=2, headers={"X-ConServe-Expected-Resume-S": "25"})
        await answer
    await eventually(
        "it has used what is its own",
        lambda: {one for one in _SHOWN_BY if metric(_SHOWN_BY[one])} == _SHOWN_BY.keys() & has,
    )
