"""One prefill, one handoff, one decoder a conversation, and the answers of a lone engine."""

import asyncio
import random

import httpx
import pytest

from tests.engines.applications import MAIN
from tests.engines.client import BLOCK_TOKENS, Agent, engines, last_turn, lone_answer, prose
from tests.engines.engine_calls import complete, compute
from tests.engines.metrics import metric
from tests.engines.stage import Stage

pytestmark = [pytest.mark.anyio, pytest.mark.application(MAIN)]

TURNS = 5
OUTPUT_TOKENS = 24


def _whole(tokens: int) -> int:
    return tokens // BLOCK_TOKENS * BLOCK_TOKENS


async def _prefiller_requests(client: httpx.AsyncClient) -> float:
    """By the prefiller's own count."""
    total = 0.0
    for engine in engines("prefiller"):
        exposed = (await client.get(engine["url"] + "/metrics")).text
        total += metric("vllm:request_success_total", exposed)
    return total


def test_engines_hand_over_whole_as_the_router_asks_them(
    application: str, rng: random.Random
) -> None:
    """By the calls of tests on a GPU, which are made nowhere else without one."""
    (prefiller,), (decoder, other) = engines("prefiller"), engines("decoder")
    for giver, taker in ((prefiller, decoder), (decoder, other)):
        prompt = [rng.randrange(1000, 4000) for _ in range(2000)]
        assert compute(giver["url"], prompt).found_tokens == 0
        taken = complete(taker["url"], prompt, 1, prefilled=True)
        assert taken.found_tokens == _whole(len(prompt) - 1)


async def test_eight_conversations_of_five_turns(
    application: str, stage: Stage, client: httpx.AsyncClient, rng: random.Random
) -> None:
    """What the paper promises, measured by the engines, with outputs to the last token."""
    stage.wait_for_lone()
    before = await _prefiller_requests(client)
    agents = [Agent(client, f"eight-{n}" if n % 2 else None) for n in range(8)]
    lengths = [4200, 60, 900, 4500, 300, 1500, 4100, 130]
    appended = [20, 80, 150, 300]
    prompts = [
        [prose(rng, length), *(prose(rng, words) for words in appended)] for length in lengths
    ]

    async def run(agent: Agent, says: list[str]) -> None:
        for turn, content in enumerate(says):
            await agent.say(content, tokens=OUTPUT_TOKENS, stream=turn % 2 == 1)

    await asyncio.gather(*map(run, agents, prompts))

    long_ones = 0
    for agent in agents:
        first, *later = agent.stats
        long_ones += first["prompt_tokens"] >= 4000
        # Turn 1: every whole chunk from LMCache. A prompt is never served from the cache to its
        # last token, since that one has to be computed to get the next.
        assert first["lmcache_tokens"] == _whole(first["prompt_tokens"] - 1)
        assert first["decoder_cached_tokens"] == 0
        held = first["prompt_tokens"] + first["output_tokens"]
        for stats in later:
            assert stats["lmcache_tokens"] == 0
            # The last generated token has no KV yet.
            assert stats["decoder_cached_tokens"] == _whole(held - 1)
            held = stats["prompt_tokens"] + stats["output_tokens"]
        assert len({reply.decoder for reply in agent.replies}) == 1
        assert len({reply.conversation for reply in agent.replies}) == 1
    assert long_ones >= 3
    assert await _prefiller_requests(client) - before == len(agents)

    held_tokens = sum(
        agent.stats[-1]["prompt_tokens"] + agent.stats[-1]["output_tokens"] for agent in agents
    )
    assert metric("conserve_decoder_held_tokens") == held_tokens

    for agent in agents:
        for turn in range(TURNS):
            asked, answer = agent.messages[: 2 * turn + 1], agent.messages[2 * turn + 1]
            assert await lone_answer(client, asked, OUTPUT_TOKENS) == answer["content"]


async def test_completions_go_the_same_way(
    application: str, client: httpx.AsyncClient, rng: random.Random
) -> None:
    """`/v1/completions`: with an id a conversation, without one a single turn."""
    prompt = prose(rng, 500)
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
    first = await client.post(
        application + "/v1/completions", json=body, headers={"X-Conversation-Id": "completion"}
    )
    assert first.status_code == 200, first.text
    stats = await last_turn(client, "completion")
    assert stats["lmcache_tokens"] == _whole(stats["prompt_tokens"] - 1) > 0

    again = {**body, "prompt": prompt + first.json()["choices"][0]["text"] + " and more"}
    second = await client.post(
        application + "/v1/completions", json={**again, "conversation_id": "completion"}
    )
    assert second.status_code == 200, second.text
    stats = await last_turn(client, "completion")
    assert stats["lmcache_tokens"] == 0
    assert stats["decoder_cached_tokens"] >= _whole(stats["prompt_tokens"]) - BLOCK_TOKENS

    single = await client.post(
        application + "/v1/completions", json={**body, "prompt": [5, 6, 7, 8]}
    )
    assert single.status_code == 200, single.text
    name = single.headers["x-conversation-id"]
    assert (await client.get(f"{application}/v1/conversations/{name}")).status_code == 404


async def test_a_shared_system_prompt_is_found_where_it_lies(
    application: str, client: httpx.AsyncClient, rng: random.Random
) -> None:
    """A second conversation's prefix is in the decoder's cache or in LMCache, never computed."""
    system = {"role": "system", "content": prose(rng, 400)}
    for number in range(4):
        agent = Agent(client, f"shared-{number}", [system])
        await agent.say(prose(rng, 50), tokens=4)
        stats = agent.stats[0]
        found = stats["lmcache_tokens"] + stats["decoder_cached_tokens"]
        assert found == _whole(stats["prompt_tokens"] - 1)
