"""``kill -9`` on every kind of process; users see at most one clean error."""

import asyncio
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from conserve.launch import shared_memory_of
from tests.engines.applications import MAIN
from tests.engines.client import (
    TIMEOUT_S,
    Agent,
    chat,
    engines,
    lone_answer,
    prose,
)
from tests.engines.metrics import metric
from tests.engines.processes import LMCACHE, kill, processes
from tests.engines.stage import Stage
from tests.engines.waiting import eventually

pytestmark = [pytest.mark.anyio, pytest.mark.application(MAIN, last=True)]

OUTPUT_TOKENS = 16
STORY_TOKENS = 400


async def _start(client: httpx.AsyncClient, rng: random.Random, names: list[str]) -> list[Agent]:
    agents = [Agent(client, None if name.startswith("nameless") else name) for name in names]
    for agent in agents:
        await agent.say(prose(rng, 400), tokens=OUTPUT_TOKENS)
    return agents


async def _same_as_lone(client: httpx.AsyncClient, agent: Agent, turn: int) -> bool:
    asked, answer = agent.messages[: 2 * turn + 1], agent.messages[2 * turn + 1]
    return await lone_answer(client, asked, OUTPUT_TOKENS) == answer["content"]


def _by_decoder(agents: list[Agent]) -> dict[str, list[Agent]]:
    found: dict[str, list[Agent]] = {}
    for agent in agents:
        found.setdefault(agent.replies[0].decoder, []).append(agent)
    return found


def _require_one_answer(events: list[Any]) -> None:
    """A stream has one name and time, one beginning and one end."""
    assert len({(event["id"], event["created"]) for event in events}) == 1
    choices = [choice for event in events for choice in event["choices"]]
    assert [bool(choice["delta"].get("role")) for choice in choices].count(True) == 1
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]


@pytest.mark.parametrize(
    "victim",
    [
        pytest.param("replica", marks=pytest.mark.long),
        "engine core",
        pytest.param("engine core, by SIGTERM", marks=pytest.mark.long),
    ],
)
async def test_a_decoder_in_mid_turn(
    application: str,
    stage: Stage,
    client: httpx.AsyncClient,
    rng: random.Random,
    victim: str,
) -> None:
    """Its streams go on elsewhere, but for what cannot; next turns do too; others are spared."""
    stage.wait_for_lone()
    agents = await _start(client, rng, [f"{victim}-{n}" for n in range(3)] + ["nameless"])
    groups = _by_decoder(agents)
    assert len(groups) == 2
    doomed, spared = groups.values()
    assert len(doomed) > 1
    lost = doomed[0].replies[0].decoder
    pid = next(engine["pid"] for engine in engines("decoder") if engine["id"] == lost)
    # Nothing that would stay of it, whoever is left to remove it.
    assert not shared_memory_of([pid, *(one.pid for one in processes("", below=pid))])
    if victim != "replica":
        pid = processes("EngineCore", below=pid)[0].pid
    moves = metric("conserve_moves_total")
    failed = metric("conserve_turns_total", outcome="failed")
    continued = metric("conserve_stream_moves_total")

    began = [asyncio.Event(), asyncio.Event()]
    # Log-probabilities of tokens that were sent are nowhere any more.
    cut_off = asyncio.ensure_future(
        chat(
            client,
            [*doomed[0].messages, {"role": "user", "content": "take your time"}],
            doomed[0].id,
            tokens=4000,
            stream=True,
            began=began[0],
            logprobs=True,
        )
    )
    story = doomed[-1]
    story.messages.append({"role": "user", "content": "a long story, please: é 東京"})
    telling = asyncio.ensure_future(story.ask(tokens=STORY_TOKENS, stream=True, began=began[1]))
    undisturbed = asyncio.ensure_future(spared[0].say("meanwhile", tokens=OUTPUT_TOKENS))
    for event in began:
        await asyncio.wait_for(event.wait(), TIMEOUT_S)
    await asyncio.sleep(0.3)
    if victim.endswith("SIGTERM"):
        # It aborts what it has, which must not pass for answers that are whole.
        os.kill(pid, signal.SIGTERM)
    else:
        kill(pid)

    events: Any = (await cut_off).body
    error = events[-1]["error"]
    assert error["message"]
    assert "Traceback" not in error["message"]
    told = await telling
    _require_one_answer(told.body)
    assert told.content == await lone_answer(client, story.messages, STORY_TOKENS)
    story.messages.append({"role": "assistant", "content": told.content})
    story.replies.append(told)
    assert metric("conserve_stream_moves_total") == continued + 1
    await undisturbed

    for agent in agents:
        reply = await agent.say("go on", tokens=OUTPUT_TOKENS)
        # The reply may come from the replacement already, never from the lost one.
        assert reply.decoder != lost
        assert reply.conversation == agent.replies[0].conversation
        assert await _same_as_lone(client, agent, len(agent.replies) - 1)
    assert metric("conserve_moves_total") - moves == len(doomed)
    await eventually(
        "the broken-off turn counts as failed",
        lambda: metric("conserve_turns_total", outcome="failed") == failed + 1,
    )
    for agent in spared:
        assert {reply.decoder for reply in agent.replies} == {spared[0].replies[0].decoder}
        assert all(stats["lmcache_tokens"] == 0 for stats in agent.stats[1:])
    for agent in doomed[:-1]:
        # Prefilled again on the prefiller, handed over again.
        assert agent.stats[-1]["lmcache_tokens"] > 0
    await asyncio.to_thread(stage.wait_until_whole)


@pytest.mark.full
@pytest.mark.parametrize("victim", ["replica", pytest.param("engine core", marks=pytest.mark.long)])
async def test_the_prefiller(
    application: str,
    stage: Stage,
    client: httpx.AsyncClient,
    rng: random.Random,
    victim: str,
) -> None:
    """Cold conversations are served while it is away, and it is used again when it is back.

    A SIGTERM breaks the forward pass off where it stands; half-computed KV must not
    become anybody's prefix.
    """
    stage.wait_for_lone()
    (agent,) = await _start(client, rng, [f"warm-{victim}"])
    (prefiller,) = engines("prefiller")
    prompts = [prose(rng, 2500) for _ in range(3)]
    colds = [Agent(client, f"cold-{victim}-{n}") for n in range(3)]
    running = [
        asyncio.ensure_future(cold.say(prompt, tokens=OUTPUT_TOKENS))
        for cold, prompt in zip(colds, prompts, strict=True)
    ]
    await asyncio.sleep(0.3)
    if victim == "replica":
        kill(prefiller["pid"])
    else:
        (core,) = processes("EngineCore", below=prefiller["pid"])
        core.terminate()
    await asyncio.gather(*running)
    await agent.say("go on", tokens=OUTPUT_TOKENS)
    alone = Agent(client, f"without-{victim}")
    await alone.say(prose(rng, 300), tokens=OUTPUT_TOKENS)
    assert alone.stats[0]["lmcache_tokens"] == 0
    for served in (*colds, alone):
        assert await _same_as_lone(client, served, 0)
    await asyncio.to_thread(stage.wait_until_whole)
    for cold in colds:
        # What lies in LMCache now is right as well.
        cold.messages[1:] = []
        reply = await chat(client, cold.messages, f"again-{cold.id}", tokens=OUTPUT_TOKENS)
        cold.messages.append({"role": "assistant", "content": reply.content})
        assert await _same_as_lone(client, cold, 0)
    back = Agent(client, f"back-{victim}")
    await back.say(prose(rng, 300), tokens=OUTPUT_TOKENS)
    assert back.stats[0]["lmcache_tokens"] > 0


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
async def test_the_lmcache_server(
    application: str, stage: Stage, client: httpx.AsyncClient, rng: random.Random, by: int
) -> None:
    """Engines recompute while it is down or silent, and use it again when it is back."""
    stage.wait_for_lone()
    (agent,) = await _start(client, rng, ["cached"])
    (server,) = processes(LMCACHE)
    lost = await _shared_with_engines(server.pid)
    running = [
        asyncio.ensure_future(
            Agent(client, f"during-{n}").say(prose(rng, 2000), tokens=OUTPUT_TOKENS)
        )
        for n in range(2)
    ]
    await asyncio.sleep(0.2)
    os.kill(server.pid, by)
    await asyncio.gather(*running)
    await agent.say("go on", tokens=OUTPUT_TOKENS)
    down = Agent(client, "down")
    await down.say(prose(rng, 300), tokens=OUTPUT_TOKENS)
    for served, turn in ((agent, 1), (down, 0)):
        assert await _same_as_lone(client, served, turn)

    await _lmcache_is_used(client, rng)
    (restarted,) = processes(LMCACHE)
    assert restarted.pid != server.pid
    await _shared_with_engines(restarted.pid)
    # What the dead one had would stay taken, if an engine kept it.
    await eventually(
        "no engine has the dead server's memory mapped",
        lambda: not any(lost in _memory_of(one.pid) for one in processes("VLLM::EngineCore")),
    )


async def _lmcache_is_used(client: httpx.AsyncClient, rng: random.Random) -> None:
    # Five health checks of up to 5 s each find a server that is silent.
    for attempt in range(90):
        again = Agent(client, f"again-{attempt}")
        await again.say(prose(rng, 300), tokens=4)
        if again.stats[0]["lmcache_tokens"]:
            return
        await asyncio.sleep(1)
    pytest.fail("LMCache was not used again within 90 s")


async def _shared_with_engines(server: int) -> int:
    """Make sure that the engines have this LMCache server's memory mapped; its inode."""
    (pool,) = _memory_of(server)
    await eventually(
        "the prefiller and both decoders copy from and to the server's memory",
        lambda: sum(pool in _memory_of(one.pid) for one in processes("VLLM::EngineCore")) == 3,
    )
    return pool


def _memory_of(pid: int) -> set[int]:
    """Inodes of the memory without a name that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {int(line.split()[4]) for line in lines if "/memfd:conserve" in line}


async def test_the_conversation_table(
    application: str, client: httpx.AsyncClient, rng: random.Random
) -> None:
    """Bindings are recovered from the decoders: no wrong routing, with an id or without."""
    agents = await _start(client, rng, ["one", "two", "nameless-1", "nameless-2"])
    shown = {
        agent.replies[0].conversation: agent.stats[0]["prompt_tokens"] + OUTPUT_TOKENS
        for agent in agents
    }
    gone = await _start(client, rng, ["gone"])
    await client.delete(application + "/v1/conversations/gone")
    await asyncio.sleep(2)  # The decoders have heard of it.
    agents[0].messages.append({"role": "user", "content": "this turn is under way"})
    running = asyncio.ensure_future(agents[0].ask(tokens=600, stream=True))
    # This one ends while nobody keeps the table.
    brief = asyncio.ensure_future(agents[2].say("in short", tokens=150))
    await asyncio.sleep(0.5)
    (table,) = processes("ray::TableActor")
    kill(table.pid)

    await brief
    replies = await asyncio.gather(
        *(agent.say("go on", tokens=OUTPUT_TOKENS) for agent in agents[1:])
    )
    for agent, reply in zip(agents[1:], replies, strict=True):
        assert reply.decoder == agent.replies[0].decoder
        assert reply.conversation == agent.replies[0].conversation
        assert agent.stats[-1]["lmcache_tokens"] == 0
        assert agent.stats[-1]["decoder_cached_tokens"] > 300
    assert (await running).status == 200
    held = {
        entry["id"]: entry["held_tokens"]
        for entry in (await client.get(application + "/v1/conversations")).json()["data"]
    }
    assert set(held) == set(shown)
    assert gone[0].replies[0].conversation not in held
    assert metric("conserve_decoder_held_tokens") == sum(held.values())
    assert all(held[name] > tokens for name, tokens in shown.items())


async def test_a_drained_decoder(
    application: str, stage: Stage, client: httpx.AsyncClient, rng: random.Random
) -> None:
    """Its turn ends there, then its conversations go on elsewhere; the next table forgets it."""
    stage.wait_for_lone()
    groups = _by_decoder(await _start(client, rng, [f"drained-{n}" for n in range(4)]))
    (drained, moving), (other, _) = groups.items()
    story = moving[0]
    story.messages.append({"role": "user", "content": "a long story, please"})
    began = asyncio.Event()
    telling = asyncio.ensure_future(story.ask(tokens=STORY_TOKENS, stream=True, began=began))
    await asyncio.wait_for(began.wait(), TIMEOUT_S)
    answer = await client.post(f"{application}/v1/engines/{drained}/drain", json={})
    assert (answer.status_code, answer.json()["conversations"]) == (200, 1)
    refused = await client.post(f"{application}/v1/engines/{other}/drain", json={})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "last_engine")

    told = await telling
    assert told.decoder == drained
    assert told.content == await lone_answer(client, story.messages, STORY_TOKENS)
    story.messages.append({"role": "assistant", "content": told.content})
    # It goes with the table's next look.
    await eventually(
        "the drained decoder is empty",
        lambda: [one["conversations"] for one in engines("decoder") if one["id"] == drained] == [0],
    )
    for agent in [*moving, Agent(client, "after-the-drain")]:
        reply = await agent.say("go on", tokens=OUTPUT_TOKENS)
        assert reply.decoder == other
        asked = agent.messages[:-1]
        assert reply.content == await lone_answer(client, asked, OUTPUT_TOKENS)
    command = [sys.executable, "-m", "conserve_cli.main", "drain", drained, application]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
    assert done.stdout == f"{drained} takes nothing new. It is empty.\n", done.stderr

    (table,) = processes("ray::TableActor")
    kill(table.pid)
    await eventually(
        "both decoders take new conversations",
        lambda: [one["leaving"] for one in engines("decoder")] == [False, False],
    )


async def test_the_node_actor(
    application: str, client: httpx.AsyncClient, rng: random.Random
) -> None:
    """Its LMCache server goes with it, and both come back."""
    (actor,) = processes("ray::NodeService")
    (server,) = processes(LMCACHE)
    kill(actor.pid)
    await eventually(
        "the server has gone with it",
        lambda: server.pid not in [p.pid for p in processes(LMCACHE)],
    )
    await _start(client, rng, ["orphaned"])
    await _lmcache_is_used(client, rng)
