"""Whether table, decoders and engines agree once all conversations have ended."""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import httpx

from conserve.wire import ALONE_S
from tests.acceptance.chaos.tally import Tally
from tests.engines.client import Agent, engines, new_client
from tests.engines.metrics import exposed, metric
from tests.engines.processes import processes

# A turn whose client has left is given up after 10 s at the latest; decoders hear with their next
# beat what has ended. One of a dead router waits for its client.
_AT_REST_S = ALONE_S + 60.0
_FRESH = 6

Bound = dict[str, tuple[str, int]]
# Of one that is paused, or whose decoder was lost.
NOWHERE = ("", 0)


async def check(url: str, tally: Tally) -> None:
    """Fails, in the tally, what does not agree; ends every conversation.

    The table is killed on the way: the next one is made from what decoders hold.

    Args:
        url: of the application, which is whole, and has no client any more.
    """
    before: Bound = {}
    # Of those that are left over, some may have been idle for as long as they may.
    try:
        fresh = [await _converse(number) for number in range(_FRESH)]
    except (AssertionError, httpx.HTTPError) as error:
        tally.fail(f"a new conversation, when all is over: {error}")
        return

    async def held_tokens_agree() -> None:
        nonlocal before
        before = await asyncio.to_thread(_bound, url)

    if not await _eventually(tally, "at rest", held_tokens_agree):
        return
    for name, tokens in tally.held.items():
        if name in before and before[name][0] and before[name][1] != tokens:
            tally.fail(f"{name} holds {before[name][1]} tokens, and its client counted {tokens}")
    await asyncio.sleep(3)  # The decoders have heard of what has ended.
    (table,) = await asyncio.to_thread(processes, "ray::TableActor")
    os.kill(table.pid, signal.SIGKILL)

    async def rebuilt_alike() -> None:
        after = await asyncio.to_thread(_bound, url)
        assert set(fresh) <= set(after), f"of {fresh}, only {sorted(after)} are known"
        # What was bound nowhere, a decoder may hold yet.
        bound = {id: one for id, one in after.items() if before.get(id, NOWHERE) != NOWHERE}
        assert bound.items() <= before.items(), f"{_difference(before, after)}"
        assert set(after) <= set(before), f"{_difference(before, after)}"

    await _eventually(tally, "with a table made from what decoders hold", rebuilt_alike)
    for name in before:
        async with httpx.AsyncClient(timeout=60) as client:
            response = await client.delete(f"{url}/v1/conversations/{name}")
        if response.status_code != 200 and name in fresh:
            tally.fail(f"{name} cannot be ended: {response.text}")

    async def nothing_counts() -> None:
        await asyncio.to_thread(_require_nothing, url)

    await _eventually(tally, "with all conversations ended", nothing_counts)


async def _converse(number: int) -> str:
    """A short conversation on an application that is whole; returns its id."""
    async with new_client() as client:
        # Every other is recognised by its messages.
        agent = Agent(client, f"fresh-{number}" if number % 2 else None)
        for words in (200, 20):
            await agent.say(f"fresh {number} " + "word " * words, tokens=8, stream=True)
    return agent.replies[-1].conversation


async def _eventually(tally: Tally, when: str, holds: Callable[[], Any]) -> bool:
    deadline_s = time.monotonic() + _AT_REST_S
    while True:
        try:
            await holds()
            return True
        except (AssertionError, httpx.HTTPError) as error:
            if time.monotonic() > deadline_s:
                tally.fail(f"{when}: {error}")
                return False
        await asyncio.sleep(1)


def _bound(url: str) -> Bound:
    """Where each conversation is bound, and holds how much; fails if accounts differ."""
    listed = httpx.get(f"{url}/v1/conversations?limit=10000", timeout=30)
    assert listed.status_code == 200, listed.text
    live = listed.json()["data"]
    assert len(live) == listed.json()["total"]
    histories = [history for one in live for history in one["histories"]]
    busy = [one["id"] for one in live if one["phase"] == "reasoning"]
    assert not busy, f"turns still run of {busy}"
    text = exposed(url)
    for engine in engines():
        _require_idle(engine)
        if engine["role"] == "prefiller":
            assert engine["queued_tokens"] == 0, f"{engine['id']} has a queue"
            continue
        mine = [one for one in histories if one["decoder"] == engine["id"]]
        # What several begin with counts once, so they hold less than in all.
        most = sum(one["held_tokens"] for one in mine)
        least = most - sum(one["shared_tokens"] for one in mine)
        shown = metric("conserve_decoder_held_tokens", text, decoder=engine["id"])
        assert engine["conversations"] == len(mine)
        assert engine["held_tokens"] == shown
        assert least <= shown <= most, f"{engine['id']}: {shown} held, {least} to {most} in all"
    assert metric("conserve_conversations", text) == len(histories)
    assert metric("conserve_queue_length", text) == 0
    return {
        one["id"]: NOWHERE if one["decoder"] is None else (one["decoder"], one["held_tokens"])
        for one in live
    }


def _require_idle(engine: dict[str, Any]) -> None:
    """Nothing of a request is left in an engine, and no KV is kept for one."""
    text = exposed(engine["url"])
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        value = metric(f"vllm:{name}", text)
        assert value == 0, f"{engine['id']}: vllm:{name} is {value}"


def _require_nothing(url: str) -> None:
    assert _bound(url) == {}
    text = exposed(url)
    for name in (
        "conserve_conversations",
        "conserve_decoder_held_tokens",
        "conserve_decoder_conversations",
        "conserve_prefiller_queued_tokens",
    ):
        assert metric(name, text) == 0, name


def _difference(before: Bound, after: Bound) -> str:
    names = sorted(name for name in after if before.get(name) != after[name])
    shown = [f"{name}: {before.get(name)} became {after[name]}" for name in names[:5]]
    return f"{len(names)} differ: " + "; ".join(shown)
