"""``kill -9`` of LMCache's server and of engines on a GPU; they come back, and so does memory."""

import asyncio
import random
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.acceptance.gpu.card import used_bytes
from tests.acceptance.gpu.conftest import ANSWER_TOKENS, is_replaced, new_prompt
from tests.engines.applications import GPU
from tests.engines.client import Agent, engines, prose
from tests.engines.engine_calls import complete, compute, whole_chunks
from tests.engines.processes import LMCACHE, kill, processes
from tests.engines.stage import Stage
from tests.engines.streams import Put
from tests.engines.waiting import eventually

pytestmark = [pytest.mark.anyio, pytest.mark.application(GPU, last=True)]

MEMORY_S = 180.0
# Contexts and what allocators keep differ a little from start to start.
SLACK_BYTES = 2 << 30


@pytest.mark.step("LMCache killed")
async def test_turns_end_when_loads_are_cut_off(application: str, figure: Put) -> None:
    """The decoder computes what it was loading, and answers as the prefiller does."""
    (prefiller,), (decoder,) = engines("prefiller"), engines("decoder")
    prompts = [new_prompt(f"cut off {number}", 16_000) for number in range(4)]
    for prompt in prompts:
        compute(prefiller["url"], prompt)
    (server,) = processes(LMCACHE)
    with ThreadPoolExecutor() as pool:
        turns = [
            pool.submit(complete, decoder["url"], prompt, ANSWER_TOKENS, prefilled=True)
            for prompt in prompts
        ]
        await asyncio.sleep(0.02)
        kill(server.pid)
        killed_s = time.monotonic()
        taken = [turn.result() for turn in turns]
    figure("turns that were loading took at most", max(one.took_s for one in taken), "s")
    for prompt, one in zip(prompts, taken, strict=True):
        assert one.text == complete(prefiller["url"], prompt, ANSWER_TOKENS).text

    def is_handed_over() -> bool:
        prompt = new_prompt(f"again {time.monotonic()}", 1_000)
        compute(prefiller["url"], prompt)
        found = complete(decoder["url"], prompt, 1, prefilled=True).found_tokens
        return found == whole_chunks(prompt)

    await eventually("engines hand over again", is_handed_over, timeout_s=120)
    figure("whole handoffs again after", time.monotonic() - killed_s, "s")


@pytest.mark.step("engines killed")
@pytest.mark.parametrize("victim", ["decoder", "prefiller", "decoder's worker"])
async def test_a_killed_engine_is_back_with_its_memory(
    application: str, stage: Stage, client: httpx.AsyncClient, figure: Put, victim: str
) -> None:
    """By its replica's process, or the one on the GPU; then a conversation is served as before."""
    role = victim.partition("'")[0]
    (engine,) = engines(role)
    before_bytes = used_bytes()
    if victim == role:
        kill(engine["pid"])
    else:
        # Each replica is younger than its like that was killed before; so is its worker.
        workers = sorted(processes("RayWorkerProc"), key=lambda one: one.create_time())
        assert len(workers) == 2
        kill(workers[-1].pid)
    killed_s = time.monotonic()
    missed_s = await is_replaced(stage, engine)
    back_s = time.monotonic() - killed_s
    await eventually(
        "no more memory is taken than before",
        lambda: used_bytes() < before_bytes + SLACK_BYTES,
        timeout_s=MEMORY_S,
    )
    figure(f"{victim} killed: missed after", missed_s, "s")
    figure(f"{victim} killed: serves after", back_s, "s")
    more_bytes = used_bytes() - before_bytes
    figure(f"{victim} killed: more memory taken than before", more_bytes / 2**30, "GiB")
    agent = Agent(client, f"after {victim}")
    await agent.say(prose(random.Random(victim), 2000), tokens=16)
    assert agent.stats[0]["lmcache_tokens"] > 0
