"""A running application that is changed: its clients notice nothing of it."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from conserve.launch import Launch
from tests.engines.applications import MAIN, START_S, URL
from tests.engines.processes import at_port, processes

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("autoscale", "conserve", "conserve_cli", "conserve_tools", "deployments", "hetero")
AGENTS = 16
THINKS_S = 0.5
SETTINGS = {
    "engine.dtype": "float32",
    "lmcache.size_gb": "0.5",
    "decoders": "2",
    "decoders.num_cpus": "0.1",
    "prefillers.num_cpus": "0.1",
    "drain_timeout_s": "120",
}
# Replicas import the code from where their runtime environment says, as after `serve deploy`.
DEPLOY = """
import json, os, sys
import ray
from ray import serve
from deployments.app import app
from deployments.upstream.outer_address import find_on_loopback
find_on_loopback(os.environ["RAY_ADDRESS"])
ray.init(runtime_env={"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}})
serve.run(app(json.loads(sys.argv[1])), name="default", route_prefix="/")
"""


@dataclass(eq=False)
class Traffic:
    """Agents that stream, and what went wrong: they try nothing twice."""

    problems: list[str] = field(default_factory=list)
    turns: dict[str, int] = field(default_factory=dict)
    ends: bool = False
    # What agents are told once the application is being ended.
    refused: list[httpx.Response] = field(default_factory=list)
    refusals_are_expected: bool = False

    async def agent(self, name: str) -> None:
        messages = [{"role": "user", "content": f"I am {name}. " + "Tell me more. " * 30}]
        async with httpx.AsyncClient(timeout=300) as kept:
            while not self.ends:
                try:
                    text = await self._turn(kept, name, messages)
                except httpx.HTTPError as error:
                    # At last nothing listens any more.
                    if not self.refusals_are_expected:
                        self.problems.append(f"{name}: {error!r}")
                    return
                if text is None:
                    return
                messages += [
                    {"role": "assistant", "content": text},
                    {"role": "user", "content": "Go on."},
                ]
                await asyncio.sleep(THINKS_S)
                if len(messages) > 20:
                    del messages[:]
                    name += "'"
                    messages.append({"role": "user", "content": f"I am {name} now."})

    async def _turn(
        self, client: httpx.AsyncClient, name: str, messages: list[dict[str, str]]
    ) -> str | None:
        body = {"model": "conserve-embedded", "messages": messages, "max_tokens": 24,
                "stream": True}  # fmt: skip
        headers = {"x-conversation-id": name}
        path = URL + "/v1/chat/completions"
        async with client.stream("POST", path, json=body, headers=headers) as answer:
            if answer.status_code != 200:
                await answer.aread()
                if self.refusals_are_expected and answer.status_code == 503:
                    self.refused.append(answer)
                    return None
                self.problems.append(f"{name}: {answer.status_code} {answer.text}")
                return None
            data: list[str] = []
            with contextlib.suppress(httpx.HTTPError):
                async for line in answer.aiter_lines():
                    data += [line[6:]] if line.startswith("data: ") else []
        if data[-1:] != ["[DONE]"]:
            self.problems.append(f"{name}: cut after {data[-1:]}")
            return None
        self.turns[name] = self.turns.get(name, 0) + 1
        choices = [choice for one in data[:-1] for choice in json.loads(one)["choices"]]
        return "".join(one["delta"].get("content") or "" for one in choices)


def listening() -> set[int]:
    return set(at_port(8000))


def address_of_ray() -> str:
    """The address of the Ray below this process: there may be others on the machine."""
    for one in processes("--gcs-address="):
        # One that has just ended has none any more.
        with contextlib.suppress(psutil.Error):
            for argument in one.cmdline():
                if argument.startswith("--gcs-address="):
                    return argument.partition("=")[2]
    raise AssertionError("no Ray runs")


async def deploy(settings: Mapping[str, Any], folder: Path) -> None:
    """Deploy with these settings and the code in this folder, and wait until all of it runs."""
    environment = {
        **os.environ,
        "RAY_ADDRESS": address_of_ray(),
        "PYTHONPATH": str(folder),
        "RAY_AUTH_MODE": "token",
    }
    log = folder / "deploy.log" if folder != ROOT else None
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", DEPLOY, json.dumps(settings),
        cwd=folder, env=environment, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    said, _ = await process.communicate()
    if log is not None:
        log.write_bytes(said)
    assert process.returncode == 0, said.decode()[-3000:]


async def all_have_a_turn(traffic: Traffic, agents: int) -> None:
    async with asyncio.timeout(300):
        while len(traffic.turns) < agents:  # noqa: ASYNC110
            await asyncio.sleep(0.5)


async def until_one_listens(but: set[int]) -> set[int]:
    """Return the one process that listens, once none of these does."""
    async with asyncio.timeout(300):
        while not (found := listening()) or found & but:  # noqa: ASYNC110
            await asyncio.sleep(0.5)
    return found


def another_version(folder: Path) -> Path:
    """A copy of the code whose processes say that they run it."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package)
    ran = folder / "ran"
    ran.mkdir()
    file = folder / "conserve" / "__init__.py"
    text = file.read_text().replace('__version__ = "', '__version__ = "9.')
    file.write_text(f"{text}\nimport os\nopen({str(ran)!r} + f'/{{os.getpid()}}', 'w').close()\n")
    return folder


@pytest.mark.application(MAIN, last=True)
async def test_a_router_that_is_told_to_end_is_replaced(application: str) -> None:
    traffic, first = Traffic(), listening()
    async with asyncio.TaskGroup() as agents:
        for number in range(4):
            agents.create_task(traffic.agent(f"agent-{number}"))
        try:
            await all_have_a_turn(traffic, agents=4)
            named = dict(traffic.turns)
            for pid in first:
                os.kill(pid, signal.SIGTERM)
            await until_one_listens(but=first)
            await same_conversations(named)
        finally:
            traffic.ends = True
    assert traffic.problems == []


@pytest.mark.full
async def test_clients_notice_nothing(machine_alone: None, tmp_path: Path) -> None:
    arguments = [f"{name}={value}" for name, value in SETTINGS.items()]
    # Ray's workers look for modules first in the folder where an application was started.
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    command = ["env", f"--chdir={elsewhere}", sys.executable, "-m", "conserve_cli.run", *arguments]
    environment = {"PYTHONPATH": str(ROOT)}
    traffic = Traffic()
    with Launch(arguments, tmp_path / "serve.log", environment, command) as application:
        application.wait_until_serving(URL, 1, 2, timeout_s=START_S)
        async with asyncio.TaskGroup() as agents:
            for number in range(AGENTS):
                agents.create_task(traffic.agent(f"agent-{number}"))
            try:
                await changes(traffic, tmp_path)
                traffic.refusals_are_expected = True
                assert await asyncio.to_thread(application.drain, 300)
                assert application.wait() == 0
            finally:
                traffic.ends = True
    assert traffic.problems == []
    assert all(int(one.headers["retry-after"]) > 0 for one in traffic.refused)


async def changes(traffic: Traffic, folder: Path) -> None:
    """Another setting; another version, with decoders that scale; and a router told to end."""
    await all_have_a_turn(traffic, AGENTS)
    first, named = listening(), dict(traffic.turns)
    await deploy(SETTINGS | {"queue_timeout_s": "50"}, ROOT)
    second = await until_one_listens(but=first)
    assert traffic.problems == []
    await same_conversations(named)

    version = another_version(folder / "version")
    scaled = {"decoders.max_replicas": "2"}
    await deploy(SETTINGS | scaled, version)
    third = await until_one_listens(but=second)
    assert traffic.problems == []
    assert {str(pid) for pid in third} <= {one.name for one in (version / "ran").iterdir()}

    for pid in third:
        os.kill(pid, signal.SIGTERM)
    await until_one_listens(but=third)
    assert traffic.problems == []


async def same_conversations(before: dict[str, int]) -> None:
    """Whichever had turns before the change has them yet."""
    async with httpx.AsyncClient(timeout=60) as client:
        listed = (await client.get(URL + "/v1/conversations?limit=1000")).json()["data"]
    turns = {one["id"]: one["turns"] for one in listed}
    assert {name for name, count in before.items() if turns.get(name, 0) < count} == set()
