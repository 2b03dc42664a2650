"""Adapters (LoRA) on real engines: answers, KV that never meets, and changes in place."""

import asyncio
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from conserve.adapters import adapter_in
from tests.engines.applications import PAUSING, URL
from tests.engines.client import Agent, Reply, chat, engines, lone_answer, prose
from tests.engines.lone import LONE_PORT
from tests.engines.stage import Stage
from tests.engines.waiting import eventually

pytestmark = [pytest.mark.anyio, pytest.mark.full, pytest.mark.application(PAUSING)]

MODEL = "conserve-embedded"
MODELS = (MODEL, "a", "b")


@pytest.fixture
def lone(application: str, stage: Stage) -> None:
    stage.wait_for_lone()


@pytest.fixture
def changed(stage: Stage) -> Iterator[Any]:
    """Runs `conserve adapters`; what it has added is removed in the end."""

    def run(*arguments: str) -> None:
        command = "from conserve_cli.main import cli; cli()"
        told = ["adapters", *arguments, "--file", str(stage.adapters_file)]
        subprocess.run([sys.executable, "-c", command, *told], check=True)

    yield run
    stage.adapters_file.unlink(missing_ok=True)


def cached_tokens(reply: Reply) -> int:
    """How much of its prompt no engine computed for a turn."""
    return int(reply.body["usage"]["prompt_tokens_details"]["cached_tokens"])


async def status(client: httpx.AsyncClient, model: str) -> int:
    asked = [{"role": "user", "content": "hello"}]
    return (await chat(client, asked, tokens=1, model=model)).status


async def is_served(client: httpx.AsyncClient, model: str, served: bool = True) -> None:
    """Within seconds."""
    for _ in range(50):
        if (await status(client, model) == 200) == served:
            return
        await asyncio.sleep(0.1)
    pytest.fail(f"{model}: served is not {served}")


async def answers_alike(client: httpx.AsyncClient, agent: Agent, model: str) -> None:
    """Its last answer is that of a lone engine with the adapter."""
    expected = await lone_answer(client, agent.messages[:-1], 24, model=model)
    assert agent.replies[-1].content == expected


async def test_answers_are_those_of_a_lone_engine_with_the_adapter(
    application: str, lone: None, client: httpx.AsyncClient, rng: random.Random
) -> None:
    """Also where turns with another one, and with none, are computed beside them."""
    agents = [(Agent(client), model) for model in MODELS * 3]
    for words in (200, 20):
        text = prose(rng, words)
        said = (agent.say(text, model=model, stream=True) for agent, model in agents)
        await asyncio.gather(*said)
        for agent, model in agents:
            await answers_alike(client, agent, model)
    assert len({agent.replies[-1].content for agent, _ in agents}) == len(MODELS)
    listed = (await client.get(URL + "/v1/models")).json()["data"]
    assert [one["id"] for one in listed] == list(MODELS)
    assert await status(client, "c") == 404


async def test_nothing_is_found_of_a_prompt_that_another_adapter_had(
    application: str, lone: None, client: httpx.AsyncClient, rng: random.Random
) -> None:
    """Neither in an engine nor in LMCache; with its own adapter it is found."""
    asked = [{"role": "user", "content": prose(rng, 600)}]
    for name in ("one", "another"):
        for model in MODELS:
            reply = await chat(client, asked, f"{name}-{model}", tokens=8, model=model)
            assert reply.status == 200, reply.body
            assert (cached_tokens(reply) > 0) == (name == "another"), model
    # A conversation's completions are known by its id alone.
    prompt, found = prose(rng, 300), {}
    for model in MODELS * 2:
        body = {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0}
        path, headers = "/v1/completions", {"X-Conversation-Id": "completes"}
        own = (await client.post(URL + path, json=body, headers=headers)).json()
        theirs = await client.post(f"http://127.0.0.1:{LONE_PORT}{path}", json=body)
        assert own["choices"][0]["text"] == theirs.json()["choices"][0]["text"]
        tokens = own["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert (tokens > 0) == (model in found), model
        found[model] = tokens
    shown = (await client.get(f"{URL}/v1/conversations/completes")).json()
    assert {one.get("adapter", MODEL) for one in shown["histories"]} == {*MODELS}


async def test_a_history_with_an_adapter_is_handed_off_and_parked_and_comes_back(
    application: str, lone: None, client: httpx.AsyncClient, rng: random.Random
) -> None:
    """Its decoder needs the room for others meanwhile, of which some have its text."""
    text, more = prose(rng, 850), prose(rng, 20)
    agents = [(Agent(client, f"parked-{model}"), model) for model in MODELS]
    for content in (text, more):
        for agent, model in agents:
            await agent.say(content, model=model)
            await answers_alike(client, agent, model)
    assert all(agent.stats[0]["lmcache_tokens"] >= 768 for agent, _ in agents)
    others = [Agent(client, f"other-{n}") for n in range(8)]
    for other in others:
        await other.say(prose(rng, 850), tokens=4)
    for agent, model in agents:
        await agent.say("go on", model=model)
        await answers_alike(client, agent, model)
    # From host memory, where its turn left it: no engine has computed it again.
    back = [agent for agent, _ in agents[1:] if agent.stats[-1]["lmcache_tokens"] >= 768]
    assert any(cached_tokens(agent.replies[-1]) >= 768 for agent in back)


async def test_one_comes_and_goes_while_turns_of_another_run(
    application: str, lone: None, client: httpx.AsyncClient, stage: Stage, changed: Any
) -> None:
    asked, began = [{"role": "user", "content": "count"}], asyncio.Event()
    running = chat(client, asked, tokens=400, model="a", stream=True, began=began)
    runs = asyncio.ensure_future(running)
    await began.wait()
    changed("add", "c", str(stage.adapters["c"]))
    await is_served(client, "c")
    agent, begins = Agent(client), asyncio.Event()
    await agent.say("what is new?", model="c")
    await answers_alike(client, agent, "c")
    lasts = asyncio.ensure_future(
        chat(client, asked, tokens=400, model="c", stream=True, began=begins)
    )
    await begins.wait()
    changed("remove", "c")
    await is_served(client, "c", served=False)
    for model, one in (("a", runs), ("c", lasts)):
        reply = await one
        assert reply.status == 200
        assert reply.content == await lone_answer(client, asked, 400, model=model)
    # Under the same name, another one is another one.
    changed("add", "c", str(stage.adapters["b"]))
    await is_served(client, "c")
    again = await chat(client, agent.messages[:1], agent.replies[0].conversation, model="c")
    assert again.content == await lone_answer(client, agent.messages[:1], 24, model="b")
    assert cached_tokens(again) == 0


async def test_an_engine_tells_which_adapters_it_has(
    application: str, client: httpx.AsyncClient, stage: Stage
) -> None:
    assert await status(client, "a") == 200
    own = adapter_in("a", str(stage.adapters["a"])).id

    def told() -> bool:
        return any(own in (one["load"] or {}).get("adapters", ()) for one in engines("decoder"))

    await eventually("the table is told", told)
