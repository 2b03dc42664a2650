"""Agents that mix two models and two adapters, while engines die and one model is changed."""

import asyncio
import copy
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from conserve.embedded import model_path
from conserve.launch import Launch
from tests.adapter_files import make_adapter
from tests.engines.applications import START_S, URL
from tests.engines.client import prose
from tests.engines.lone import LONE_PORT, lone_engine, wait_for_lone
from tests.engines.metrics import metric
from tests.engines.processes import kill
from tests.engines.upgrades.test_upgrades import ROOT, deploy

AGENTS, TOKENS = 16, 16
SOURCES = {"big": "embedded", "small": "embedded-vision"}
ROOM = {"max_model_len": 2944, "num_gpu_blocks_override": 24}
# First prompts of the large one are handed off, and its histories have room for a few agents.
SETTINGS: dict[str, Any] = {
    "engine": {"dtype": "float32"},
    "lmcache.size_gb": 1,
    "drain_timeout_s": 120,
    "prefillers.num_cpus": 0.1,
    "decoders.num_cpus": 0.1,
    "models": {
        "big": {
            "model": SOURCES["big"],
            "placement": "conversation",
            "decoders": {"replicas": 2, "engine": ROOM},
            "aliases": ["claude-*"],
        },
        "small": {
            "model": SOURCES["small"],
            "prefillers": 0,
            "decoders": {"replicas": 1, "engine": ROOM},
            "aliases": ["claude-haiku-*"],
        },
    },
}
# Of the large model.
ADAPTERS = ("sql", "poems")
NAMES = {
    "big": ("big", "claude-opus-4"),
    "small": ("small", "claude-haiku-4-5"),
    **{name: (name,) for name in ADAPTERS},
}
Messages = list[dict[str, str]]


@dataclass(eq=False)
class Traffic:
    """Agents, what they were answered, and what went wrong: they try nothing twice."""

    turns: list[tuple[str, Messages, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    found_across: int = 0
    # The model whose only engine is being replaced: it refuses turns until there is another one.
    replaced: str | None = None
    ends: bool = False

    async def agent(self, name: str) -> None:
        rng = random.Random(name)
        async with httpx.AsyncClient(timeout=300) as client:
            while not self.ends:
                await self._conversation(client, name, rng)
                name += "'"

    async def _conversation(self, client: httpx.AsyncClient, name: str, rng: random.Random) -> None:
        messages: Messages = [{"role": "user", "content": f"{name} says: {prose(rng, 400)}"}]
        used: set[str] = set()
        while not self.ends and len(messages) < 20:
            model = rng.choice([*NAMES])
            body = {"model": rng.choice(NAMES[model]), "messages": messages,
                    "max_tokens": TOKENS, "temperature": 0}  # fmt: skip
            answer = await client.post(
                f"{URL}/v1/chat/completions", json=body, headers={"x-conversation-id": name}
            )
            if answer.status_code == 503 and model == self.replaced:
                await asyncio.sleep(1)
                continue
            if answer.status_code != 200:
                self.problems.append(f"{name}, {model}: {answer.status_code} {answer.text}")
                return
            told = answer.json()
            text = told["choices"][0]["message"]["content"] or ""
            if model not in used:
                # Only others have computed any of this.
                self.found_across += told["usage"]["prompt_tokens_details"]["cached_tokens"]
            used.add(model)
            self.turns.append((model, [*messages], text))
            messages += [
                {"role": "assistant", "content": text or "-"},
                {"role": "user", "content": prose(rng, 20)},
            ]
            await asyncio.sleep(rng.uniform(0.2, 1.0))

    async def until(self, turns: int) -> None:
        """Wait until this number of turns has ended from now on."""
        wanted = len(self.turns) + turns
        async with asyncio.timeout(600):
            while len(self.turns) < wanted and not self.problems:  # noqa: ASYNC110
                await asyncio.sleep(0.5)


@pytest.mark.full
async def test_agents_mix_models_while_engines_die(machine_alone: None, tmp_path: Path) -> None:
    adapters = {
        name: make_adapter(tmp_path / name, model_path(), seed)
        for seed, name in enumerate(ADAPTERS)
    }
    settings = copy.deepcopy(SETTINGS)
    settings["models"]["big"]["adapters"] = {name: str(path) for name, path in adapters.items()}
    file = tmp_path / "settings.json"
    file.write_text(json.dumps(settings))
    traffic = Traffic()
    with Launch([f"config={file}"], tmp_path / "serve.log") as application:
        application.wait_until_serving(URL, 1, 3, timeout_s=START_S)
        async with asyncio.TaskGroup() as agents:
            for number in range(AGENTS):
                agents.create_task(traffic.agent(f"agent-{number}"))
            try:
                await changes(traffic, settings)
            finally:
                traffic.ends = True
        async with httpx.AsyncClient(timeout=60) as client:
            listed = (await client.get(f"{URL}/v1/conversations")).json()["data"]
            used = {one["id"]: {of["model"] for of in one["histories"]} for one in listed}
            both = next(id_ for id_, models in used.items() if models == {*SOURCES})
            assert (await client.delete(f"{URL}/v1/conversations/{both}")).status_code == 200
            assert (await client.get(f"{URL}/v1/conversations/{both}")).status_code == 404
        handoffs = metric("conserve_handoffs_total", model="big")
        paused = metric("conserve_pauses_total")
    assert traffic.problems == []
    assert traffic.found_across == 0
    assert (handoffs > 0, paused > 0) == (True, True)
    small = [one for one in traffic.turns if one[0] == "small"]
    await compared(small, SOURCES["small"], tmp_path, {})
    others = [one for one in traffic.turns if one[0] != "small"]
    await compared(others, SOURCES["big"], tmp_path, adapters)


async def changes(traffic: Traffic, settings: dict[str, Any]) -> None:
    """Kill an engine of the large model, and then deploy with another setting of the small one."""
    await traffic.until(2 * AGENTS)
    await asyncio.to_thread(kill_a_decoder)
    await traffic.until(2 * AGENTS)
    settings["models"]["small"]["engine"] = {"max_num_seqs": 32}
    traffic.replaced = "small"
    await deploy(settings, ROOT)
    traffic.replaced = None
    await traffic.until(AGENTS)


def kill_a_decoder() -> None:
    """End the core of an engine of the large model, which has two of these."""
    engines = httpx.get(f"{URL}/v1/engines").json()["data"]
    victim = next(one for one in engines if one["model"] == "big" and one["hosts"])
    kill(psutil.Process(victim["pid"]).children()[0].pid)


async def compared(
    turns: list[tuple[str, Messages, str]], source: str, logs: Path, adapters: dict[str, Path]
) -> None:
    """Check that a lone engine, with the adapter, gives each turn the same answer."""
    answered = Counter(model for model, _, _ in turns)
    assert all(answered[model] > AGENTS / 4 for model in (*adapters, turns[0][0]))
    lone = lone_engine(logs / "lone.log", source, adapters=adapters)
    try:
        wait_for_lone(lone, logs)
        async with httpx.AsyncClient(timeout=300) as client:
            for model, messages, text in turns:
                body = {"model": model if model in adapters else "conserve-embedded",
                        "messages": messages, "max_tokens": TOKENS, "temperature": 0}  # fmt: skip
                path = f"http://127.0.0.1:{LONE_PORT}/v1/chat/completions"
                told = (await client.post(path, json=body)).json()
                assert (told["choices"][0]["message"]["content"] or "") == text
    finally:
        lone.__exit__(None, None, None)
