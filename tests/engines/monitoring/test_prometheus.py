"""Prometheus scrapes a real application: the dashboard has data, and alerts fire at real faults."""

import asyncio
import json
import os
import random
import re
import signal
import time
from pathlib import Path

import httpx
import pytest
import yaml

from tests.engines.applications import MAIN, SMALL
from tests.engines.client import Agent, chat, engines, prose
from tests.engines.metrics import exposed, metric
from tests.engines.monitoring.prometheus import FOLDER, PROGRAM, prometheus
from tests.engines.processes import kill, processes
from tests.engines.waiting import eventually

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(PROGRAM is None, reason="prometheus is not installed (Debian: prometheus)"),
]

# Of GPUs and of tenants, which this application has not.
NO_DATA = re.compile(r"conserve_(gpu|tenant)_")
SCRAPED_S = 20.0


def shown() -> list[str]:
    """The dashboard's expressions, as Grafana would send them."""
    panels = json.loads((FOLDER / "dashboard.json").read_text())["panels"]
    asked = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    return [one.replace("$job", "conserve").replace("$__rate_interval", "2m") for one in asked]


@pytest.mark.application(MAIN)
async def test_every_expression_has_data(
    application: str, client: httpx.AsyncClient, rng: random.Random, tmp_path: Path
) -> None:
    with prometheus(tmp_path) as server:
        await eventually("it is scraped", lambda: bool(server.query("conserve_replicas")))
        agents = [Agent(client, f"scraped-{number}") for number in range(3)]
        deadline_s = time.monotonic() + SCRAPED_S
        turn = 0
        while turn < 3 or time.monotonic() < deadline_s:
            for agent in agents:
                await agent.say(prose(rng, 20 if turn else 600), tokens=8, stream=True)
            turn += 1
            await asyncio.sleep(1)
        for expression in shown():
            found = server.query(expression)
            assert found or NO_DATA.search(expression), expression
            assert not any(series["value"][1] == "NaN" for series in found), expression
        rules = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"][0]["rules"]
        for rule in rules:
            assert not server.query(rule["expr"]), rule["alert"]
            # What it compares has data.
            assert server.query(rule["expr"].partition(">")[0].partition("==")[0]), rule["alert"]
        assert server.firing() == set()

        targets = server.targets()
        assert [one["lastError"] for one in targets] == [""] * len(targets)
        parts = [one["labels"] for one in targets if one["labels"]["job"] == "conserve-parts"]
        assert {one["replica"] for one in parts if one["part"] == "engine"} == {
            one["id"] for one in engines()
        }
        assert len([one for one in parts if one["part"] == "lmcache"]) == 1
        for name in ("vllm:num_requests_running", 'up{part="lmcache"} == 1'):
            assert server.query(name)
        (build,) = server.query("conserve_build_info")
        assert build["metric"]["model"] == "conserve-embedded"
        for part in ("version", "vllm", "lmcache", "ray"):
            assert re.match(r"\d+\.\d+\.\d+", build["metric"][part])


@pytest.mark.application(SMALL, last=True)
async def test_alerts_fire_at_real_faults(
    application: str, client: httpx.AsyncClient, rng: random.Random, tmp_path: Path
) -> None:
    """Without the time for which each waits before it fires, which promtool's tests have."""
    with prometheus(tmp_path, at_once=True) as server:

        async def fires(*alert: str) -> None:
            await eventually(f"{alert} fires", lambda: alert in server.firing(), 60)

        await eventually("it is scraped", lambda: bool(server.query("conserve_replicas == 1")))
        assert server.firing() == set()

        # The decoder is full.
        agents = [Agent(client, f"full-{number}") for number in range(3)]
        for agent in agents[:2]:
            await agent.say(prose(rng, 1200), tokens=4)
        page = exposed(application)
        room = metric("conserve_decoder_capacity_tokens", page)
        room -= metric("conserve_decoder_held_tokens", page)
        await agents[2].say(prose(rng, round(room) - 110), tokens=4)
        await fires("ConServeKvNearlyFull")

        async def stay() -> None:
            for agent in agents:
                await agent.say("go on", tokens=1)

        # One waits in vain, and one for long.
        tall = [{"role": "user", "content": prose(rng, 1000)}]
        await stay()
        assert (await chat(client, tall, "refused")).status == 429
        await fires("ConServeRefusals", "timeout")
        await stay()
        waiting = asyncio.ensure_future(chat(client, tall, "waits", tokens=4))
        await asyncio.sleep(6.5)
        await client.delete(application + "/v1/conversations/full-0")
        assert (await waiting).status == 200
        await fires("ConServeLongWaits")

        # The only decoder dies in mid-answer; a stream with log-probabilities cannot go on later.
        began = asyncio.Event()
        cut = asyncio.ensure_future(
            chat(client, tall, "waits", tokens=800, stream=True, began=began, logprobs=True)
        )
        await asyncio.wait_for(began.wait(), 60)
        kill(engines("decoder")[0]["pid"])
        await fires("ConServeNoEngineReady", "decoder")
        await fires("ConServeEngineLost", "decoder")
        await cut
        await fires("ConServeTurnsFail")
        await eventually(
            "another decoder is there",
            lambda: ("ConServeNoEngineReady", "decoder") not in server.firing(),
            600,
        )

        # The table hangs, for less than engines take for silence.
        (table,) = processes("ray::TableActor")
        os.kill(table.pid, signal.SIGSTOP)
        try:
            await eventually(
                "it is missed", lambda: ("ConServeTableSilent",) in server.firing(), 10
            )
        finally:
            os.kill(table.pid, signal.SIGCONT)
        await eventually("it is back", lambda: ("ConServeTableSilent",) not in server.firing(), 60)

        # LMCache's server dies between a prefill and its decode.
        for name in ("waits", *(f"full-{number}" for number in range(3))):
            await client.delete(f"{application}/v1/conversations/{name}")
        (core,) = processes("EngineCore", below=engines("decoder")[0]["pid"])
        (lmcache,) = processes(r"deployments\.node\.lmcache_main server")
        prefilled = metric("conserve_cold_prefills_total")
        os.kill(core.pid, signal.SIGSTOP)
        try:
            missed = asyncio.ensure_future(chat(client, tall, "missed", tokens=4))
            await eventually(
                "it is prefilled", lambda: metric("conserve_cold_prefills_total") > prefilled, 30
            )
            kill(lmcache.pid)
        finally:
            os.kill(core.pid, signal.SIGCONT)
        assert (await missed).status == 200
        await fires("ConServeMissedHandoffs")
