"""What ConServe costs on a GPU, and what engines on one card cost each other; printed alone."""

import asyncio
import random
import statistics
import time
from collections.abc import AsyncIterator

import httpx
import pytest

from tests.engines.applications import GPU, URL
from tests.engines.client import engines
from tests.engines.gpu.card import NEEDS_GPU, seen
from tests.engines.gpu.conftest import new_prompt

pytestmark = [NEEDS_GPU, pytest.mark.anyio, pytest.mark.application(GPU)]

PAIRS = 30
TOKENS = 64
PREFILL_TOKENS = 8_000
OTHERS = 4


async def _arrivals(
    client: httpx.AsyncClient, url: str, prompt: list[int], tokens: int, name: str | None = None
) -> AsyncIterator[float]:
    """When each part of a streamed answer comes."""
    body = {
        "model": "conserve-embedded", "prompt": prompt, "max_tokens": tokens, "temperature": 0,
        "ignore_eos": True, "stream": True,
    }  # fmt: skip
    headers = {"X-Conversation-Id": name} if name else {}
    path = url + "/v1/completions"
    async with client.stream("POST", path, json=body, headers=headers) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                yield time.perf_counter()


async def _took_s(client: httpx.AsyncClient, url: str, prompt: list[int], tokens: int) -> float:
    started_s = time.perf_counter()
    arrivals = [one async for one in _arrivals(client, url, prompt, tokens)]
    return arrivals[-1] - started_s


async def test_through_the_router_against_the_engine_itself(
    application: str, client: httpx.AsyncClient
) -> None:
    """64 streamed tokens of a short prompt, in alternating pairs: the same engine, two doors."""
    (decoder,) = engines("decoder")
    doors = {"ConServe": URL, "its engine": decoder["url"]}
    took_s: dict[str, list[float]] = {name: [] for name in doors}
    for number in range(-3, PAIRS):
        for name in sorted(doors, key=lambda name: random.Random(f"{number}{name}").random()):
            # Too short for a chunk: nothing is found, nothing is handed over.
            spent_s = await _took_s(client, doors[name], new_prompt(f"{number}{name}", 100), TOKENS)
            if number >= 0:
                took_s[name].append(spent_s)
    assert all(len(one) == PAIRS for one in took_s.values())
    ratio = statistics.median(
        ours / bare for ours, bare in zip(took_s["ConServe"], took_s["its engine"], strict=True)
    )
    seen.info(
        "%d streamed tokens: %.1f ms through ConServe, %.1f ms from its engine; ratio %.3f", TOKENS,
        *(statistics.median(one) * 1e3 for one in took_s.values()), ratio,
    )  # fmt: skip


@pytest.mark.parametrize("beside", ["nothing", "prefill on the prefiller", "prefill at home"])
async def test_what_decoding_feels(
    application: str, client: httpx.AsyncClient, beside: str
) -> None:
    """Times between tokens of four streams on the decoder, beside prompts of 8,000 tokens."""
    (prefiller,), (decoder,) = engines("prefiller"), engines("decoder")
    elsewhere = {"prefill on the prefiller": prefiller["url"], "prefill at home": decoder["url"]}
    gaps_ms: list[float] = []
    done = asyncio.Event()
    prompts = 0

    async def stream(number: int) -> None:
        last_s = None
        prompt = new_prompt(f"others {beside} {number}", 500)
        async for now_s in _arrivals(client, decoder["url"], prompt, 600):
            if last_s is not None:
                gaps_ms.append((now_s - last_s) * 1e3)
            last_s = now_s

    async def prefill() -> None:
        nonlocal prompts
        while beside in elsewhere and not done.is_set():
            prompt = new_prompt(f"{beside} {prompts}", PREFILL_TOKENS)
            await _took_s(client, elsewhere[beside], prompt, 1)
            prompts += 1

    computing = asyncio.get_running_loop().create_task(prefill())
    started_s = time.perf_counter()
    await asyncio.gather(*(stream(number) for number in range(OTHERS)))
    spent_s = time.perf_counter() - started_s
    done.set()
    await computing
    assert len(gaps_ms) > OTHERS * 100
    gaps_ms.sort()
    seen.info(
        "beside %s: time between tokens %.1f ms at the median, %.1f at p95, %.1f at most; "
        "%.0f prompt tokens/s prefilled", beside, statistics.median(gaps_ms),
        gaps_ms[int(len(gaps_ms) * 0.95)], gaps_ms[-1], prompts * PREFILL_TOKENS / spent_s,
    )  # fmt: skip
