"""A disk below host memory, when everything is started again."""

import asyncio
import os
import random
import re
from pathlib import Path

import httpx

from conserve.launch import Launch
from deployments.node.kv_files import FOLDER
from tests.engines.applications import START_S, URL
from tests.engines.client import Agent, chat, prose
from tests.engines.processes import LMCACHE, kill, processes
from tests.engines.waiting import eventually

SETTINGS = (
    "prefillers=0",
    "decoders=1",
    "engine.dtype=float32",
    "lmcache.size_gb=0.5",
    "lmcache.disk.size_gb=4",
)


async def test_agents_go_on_after_a_restart_of_everything(
    machine_alone: None, tmp_path: Path, client: httpx.AsyncClient, rng: random.Random
) -> None:
    """And before that, LMCache's server is killed while it writes."""
    settings = [*SETTINGS, f"lmcache.disk.path={tmp_path}"]
    agents = [Agent(client, f"agent-{n}") for n in range(4)]
    ended = Agent(client, "ended")
    with Launch(settings, tmp_path / "first.log") as application:
        application.wait_until_serving(URL, 0, 1, timeout_s=START_S)
        await asyncio.gather(*(one.say(prose(rng, 2000), tokens=8) for one in (*agents, ended)))
        # Its files are removed with it.
        before = files(tmp_path)
        response = await client.delete(f"{URL}/v1/conversations/{ended.id}")
        assert response.status_code == 200
        await eventually("its files are gone", lambda: len(files(tmp_path)) < len(before), 30)
        says = [asyncio.ensure_future(one.say(prose(rng, 300), tokens=8)) for one in agents]
        await eventually("it writes", lambda: files(tmp_path) - before, 60)
        (server,) = processes(LMCACHE)
        kill(server.pid)
        await asyncio.gather(*says)
        await eventually("it is back, and has heard of the engine", has_its_engine, 120)
        for _ in range(2):
            for agent in agents:
                await agent.say(prose(rng, 20), tokens=8)
    with Launch(settings, tmp_path / "second.log") as application:
        application.wait_until_serving(URL, 0, 1, timeout_s=START_S)
        found = repeated = 0
        for agent in agents:
            again = await agent.say("go on", tokens=24)
            last, now = agent.stats[-2:]
            repeated += last["prompt_tokens"] + 8
            found += now["lmcache_tokens"] + now["decoder_cached_tokens"]
            assert now["lmcache_tokens"] > 0
            # The answer is the one that it would have had, with nothing of it kept anywhere.
            agent.messages.pop()
            fresh = await chat(client, agent.messages, f"fresh-{agent.id}", cache_salt=agent.id)
            assert fresh.content == again.content
        assert found >= 0.9 * repeated, (found, repeated)
        await ended.say("go on", tokens=8)
        assert ended.stats[-1]["lmcache_tokens"] < 0.2 * ended.stats[0]["prompt_tokens"]


def has_its_engine() -> bool:
    try:
        status = httpx.get("http://127.0.0.1:7611/status", timeout=5).text
    except httpx.TransportError:
        return False
    found = re.search(r'"registered_non_cuda_instance_ids":\[\d', status)
    return found is not None


def files(path: Path) -> set[str]:
    # Unlike a glob, this does not mind that folders are removed meanwhile.
    walked = os.walk(path / FOLDER)
    return {folder for folder, _, names in walked if any(one.endswith("-0") for one in names)}
