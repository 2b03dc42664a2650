"""A recorder beside real turns: what its file has of them, and what happens when it dies."""

import asyncio
import base64
import hashlib
import json
import random
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from conserve_lab.workloads.recorded import recorded_sessions
from tests.engines.applications import ONE, URL
from tests.engines.client import Agent, prose
from tests.engines.waiting import eventually

pytestmark = [pytest.mark.anyio, pytest.mark.application(ONE)]


@pytest.fixture
async def recorder(application: str, tmp_path: Path) -> AsyncIterator[Process]:
    """Record to ``r`` in the test's folder."""
    command = (sys.executable, "-m", "conserve_cli.main", "record", str(tmp_path / "r"), URL)
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE)
    assert process.stdout is not None
    assert b"Recording conserve-embedded" in await process.stdout.readline()
    yield process
    if process.returncode is None:
        process.kill()
    await process.wait()


def lines(path: Path) -> list[dict[str, object]]:
    # The last line may be half written.
    return [json.loads(one) for one in path.read_text().split("\n")[1:-1]]


async def test_a_recording_has_nothing_that_was_sent(
    recorder: Process, client: httpx.AsyncClient, rng: random.Random, tmp_path: Path
) -> None:
    path, sent, agents = tmp_path / "r", list[str](), list[Agent]()

    def marker(kind: str) -> str:
        sent.append(f"{kind}-{rng.getrandbits(64):016x}")
        return sent[-1]

    # A decoder hears of the recorder within a beat.
    for turn in range(60):
        name = f"before{turn}"
        await Agent(client, name).say(prose(rng, 200), tokens=2)
        await client.delete(f"{URL}/v1/conversations/{name}")
        await eventually("it is recorded", lambda: len(lines(path)) > turn)  # noqa: B023
        if lines(path)[-1]["blocks"]:
            break
    before = len(lines(path))
    for number in range(3):
        name = marker(f"id{number}")
        system = f"You are {marker(f'system{number}')}. {prose(rng, 200)}"
        agent = Agent(client, name, [{"role": "system", "content": system}])
        headers = {
            "User-Agent": f"{marker(f'agent{number}')}/1.0",
            "X-Request-Id": marker(f"request{number}"),
            "X-Anything": marker(f"header{number}"),
            "X-Conversation-Parent": marker(f"parent{number}"),
        }
        tool = {"name": "look", "description": marker(f"tool{number}"), "parameters": {}}
        for turn in range(3):
            text = f"{marker(f'text{number}{turn}')} {prose(rng, 70)}"
            options = {"tools": [{"type": "function", "function": tool}], "user": name}
            await agent.say(text, tokens=8, headers=headers, stream=turn == 1, **options)
        agents.append(agent)

    await eventually("all are recorded", lambda: len(lines(path)) >= before + 9)
    recorder.terminate()
    assert await recorder.wait() == 0
    written = path.read_bytes()
    for secret in sent:
        for form in (secret.encode(), base64.b64encode(secret.encode()).rstrip(b"=")[:-1]):
            assert form not in written
        for digest in (hashlib.sha256, hashlib.blake2b, hashlib.md5):
            assert digest(secret.encode()).hexdigest()[:16].encode() not in written
    answers = [one.content for agent in agents for one in agent.replies]
    assert not [one for one in answers if len(one) > 12 and one.encode() in written]

    sessions = [read() for read in recorded_sessions(path).values()]
    recorded = [[call.prompt_tokens for call in one.calls] for one in sessions]
    for agent in agents:
        assert [stats["prompt_tokens"] for stats in agent.stats] in recorded
    # Each prompt goes on with the one before, in whole blocks.
    for earlier, call in (pair for one in sessions for pair in pairwise(one.calls)):
        assert call.kept_blocks == earlier.prompt_tokens // 64


async def test_turns_go_on_when_the_recorder_is_killed(
    recorder: Process, client: httpx.AsyncClient, rng: random.Random
) -> None:
    agent, began = Agent(client, "goes-on"), asyncio.Event()
    agent.messages.append({"role": "user", "content": prose(rng, 100)})
    asked = asyncio.create_task(agent.ask(tokens=400, stream=True, began=began))
    await began.wait()
    recorder.kill()
    await recorder.wait()
    reply = await asked
    assert reply.status == 200
    assert reply.body[-1]["choices"][0]["finish_reason"] == "length"
    assert (await agent.say("Go on.", tokens=8)).status == 200
    await client.delete(f"{URL}/v1/conversations/goes-on")
