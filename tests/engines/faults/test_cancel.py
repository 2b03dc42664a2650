"""Clients that leave: whatever stage their turns are at, no engine goes with them."""

import asyncio
import random
from typing import Any

import httpx
import pytest

from tests.engines.applications import MAIN, URL
from tests.engines.client import Agent, chat, engines, prose
from tests.engines.metrics import metric
from tests.engines.waiting import eventually

pytestmark = [pytest.mark.anyio, pytest.mark.application(MAIN, last=True)]

CLIENTS = 64
WORDS = 3000


@pytest.mark.parametrize("after_s", [0.5, 4.0])
async def test_first_turns_that_are_cancelled_together_lose_no_engine(
    application: str, client: httpx.AsyncClient, rng: random.Random, after_s: float
) -> None:
    """Most of them wait for the prefiller, some for their look-up, and one is prefilled."""
    await require_no_engine_lost(client, rng, CLIENTS, after_s)


async def require_no_engine_lost(
    client: httpx.AsyncClient, rng: random.Random, clients: int, after_s: float
) -> None:
    """Have so many first turns cancelled so long after they were sent; fails if an engine goes."""
    before, lost = _pids(), metric("conserve_engines_lost_total")
    prompts = [prose(rng, WORDS) for _ in range(clients)]
    turns = [
        asyncio.ensure_future(chat(client, [{"role": "user", "content": prompt}], tokens=4))
        for prompt in prompts
    ]
    await asyncio.sleep(after_s)
    for turn in turns:
        turn.cancel()
    await asyncio.gather(*turns, return_exceptions=True)
    # None of them said who it was, so those that were cut cannot be come back to, and count no
    # longer. Those that were answered do, whether their clients have read the answer or not.
    await eventually("no cut turn counts", lambda: all(found["turns"] == 1 for found in _live()))
    await eventually("nothing is queued", lambda: metric("conserve_prefiller_queued_tokens") == 0)
    reply = await Agent(client, "after").say("hello", tokens=4)
    assert reply.status == 200
    assert _pids() == before
    assert metric("conserve_engines_lost_total") == lost


def _live() -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = httpx.get(f"{URL}/v1/conversations", timeout=30).json()["data"]
    return listed


def _pids() -> dict[str, int]:
    return {engine["id"]: engine["pid"] for engine in engines()}
