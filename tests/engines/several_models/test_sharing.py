"""Two models on a machine with room for three engines: the one that is busy has two of them."""

import asyncio
import functools
import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from conserve.launch import Launch, health
from tests.engines.applications import START_S, URL
from tests.engines.client import Agent, engines, prose
from tests.engines.metrics import metric
from tests.engines.waiting import eventually

_PORT = 6398
_UNAUTHENTICATED = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
# An engine has room for 3,072 tokens.
ROOM = {"dtype": "float32", "max_model_len": 2944, "num_gpu_blocks_override": 24}
SETTINGS: dict[str, Any] = {
    "share_gpus": True,
    "prefillers": 0,
    "decoders": {"replicas": 1, "max_replicas": 2, "num_cpus": 1},
    "engine": ROOM,
    "lmcache": {"port": 0, "size_gb": 0.5},
    "autoscaling.window_s": 6,
    # Without another model's need, an engine would keep its conversations for so long.
    "drain_timeout_s": 1800,
    "models": {"first": {"model": "embedded"}, "second": {"model": "embedded"}},
}
AGENTS = 8


@pytest.fixture
def address(machine_alone: None, tmp_path: Path) -> Iterator[str]:
    """Of a Ray with room for three engines."""
    assert not health(URL)
    command = [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block",
        "--port", str(_PORT), "--include-dashboard", "false", "--num-cpus", "3",
    ]  # fmt: skip
    log = tmp_path / "head.log"
    with Launch([], log, _UNAUTHENTICATED, command):
        deadline_s = time.monotonic() + 60
        while "Ray runtime started" not in log.read_text():
            assert time.monotonic() < deadline_s, f"Ray did not start: see {log}"
            time.sleep(0.2)
        yield f"127.0.0.1:{_PORT}"


def serving(model: str) -> int:
    return sum(one["model"] == model and not one["leaving"] for one in engines("decoder"))


async def work(agents: list[Agent], model: str, rng: random.Random, stop: asyncio.Event) -> None:
    """Turn after turn of each agent until told to stop; fails with the first turn that fails."""

    async def one(agent: Agent) -> None:
        await agent.say(prose(rng, 500), tokens=4, model=model)
        while not stop.is_set():
            await asyncio.sleep(2)
            await agent.say(prose(rng, 3), tokens=4, model=model)

    await asyncio.gather(*map(one, agents))


@pytest.mark.full
async def test_an_idle_models_engine_goes_to_the_one_that_queues(
    address: str, client: httpx.AsyncClient, rng: random.Random, tmp_path: Path
) -> None:
    file = tmp_path / "settings.json"
    file.write_text(json.dumps(SETTINGS))
    environment = {"RAY_ADDRESS": address, **_UNAUTHENTICATED}
    with Launch([f"config={file}"], tmp_path / "serve.log", environment) as application:
        application.wait_until_serving(URL, 0, 2, timeout_s=START_S)
        teams = {
            model: [Agent(client, f"{model}-{number}") for number in range(AGENTS)]
            for model in SETTINGS["models"]
        }
        least = dict.fromkeys(teams, 2)
        for busy, idle in (("first", "second"), ("second", "first")):
            stop = asyncio.Event()
            working = asyncio.create_task(work(teams[busy], busy, rng, stop))

            def has_two(busy: str, working: asyncio.Task[None]) -> bool:
                for model in least:
                    least[model] = min(least[model], serving(model))
                return working.done() or serving(busy) == 2

            look = functools.partial(has_two, busy, working)
            await eventually(f"{busy} has two engines", look, START_S)
            assert not working.done()
            assert serving(idle) == 1
            stop.set()
            await working
        # None went below what it has in any case, and the idle one's conversations go on.
        assert least == dict.fromkeys(teams, 1)
        await asyncio.gather(*(one.say("go on", tokens=4, model="first") for one in teams["first"]))
        assert metric("conserve_engines_lost_total") == 0
        assert metric("conserve_lacked_gpus") == 0
