"""``kill -9`` of an engine on a GPU: it comes back, and so does its memory."""

import random
import time

import httpx
import psutil
import pytest

from tests.engines.applications import GPU
from tests.engines.client import Agent, engines, prose
from tests.engines.gpu.card import NEEDS_GPU, seen, used_bytes
from tests.engines.processes import kill, processes
from tests.engines.stage import Stage
from tests.engines.waiting import eventually

pytestmark = [NEEDS_GPU, pytest.mark.anyio, pytest.mark.application(GPU, last=True)]

# LMCache lets go of a dead engine's KV within 40 s; then the next one loads.
BACK_S = 300.0
MEMORY_S = 180.0
# Contexts and what allocators keep differ a little from start to start.
SLACK_BYTES = 2 << 30


def _workers() -> list[psutil.Process]:
    """The processes that have engines' memory, where engines run by Ray's executor."""
    return processes("RayWorkerProc")


@pytest.mark.parametrize("victim", ["decoder", "prefiller", "decoder's worker"])
async def test_a_killed_engine_is_back_with_its_memory(
    application: str, stage: Stage, client: httpx.AsyncClient, victim: str
) -> None:
    """By its replica's process, or the one on the GPU; then a conversation is served as before."""
    role = victim.partition("'")[0]
    (engine,) = engines(role)
    before_bytes = used_bytes()
    if victim == role:
        kill(engine["pid"])
    else:
        # Each replica is younger than its like that was killed before; so is its worker.
        workers = sorted(_workers(), key=lambda one: one.create_time())
        assert len(workers) == 2
        kill(workers[-1].pid)
    killed_s = time.monotonic()
    await eventually(
        f"the {role} is missed",
        lambda: engine["id"] not in [one["id"] for one in engines(role)],
        timeout_s=120,
    )
    missed_s = time.monotonic() - killed_s
    lowest_bytes = used_bytes()
    stage.wait_until_whole(BACK_S)
    back_s = time.monotonic() - killed_s
    await eventually(
        "no more memory is taken than before",
        lambda: used_bytes() < before_bytes + SLACK_BYTES,
        timeout_s=MEMORY_S,
    )
    seen.info(
        "%s killed: missed after %.0f s, serves after %.0f s; GiB taken before, then, now: "
        "%.1f, %.1f, %.1f", victim, missed_s, back_s, before_bytes / 2**30, lowest_bytes / 2**30,
        used_bytes() / 2**30,
    )  # fmt: skip
    agent = Agent(client, f"after {victim}")
    await agent.say(prose(random.Random(victim), 2000), tokens=16)
    assert agent.stats[0]["lmcache_tokens"] > 0
