"""Agents that send no id are served as conversations all the same."""

import asyncio
import gzip
import json
import random

import httpx
import pytest

from tests.checkout import DATA
from tests.engines.applications import MAIN
from tests.engines.client import Agent, Message, chat, prose
from tests.engines.metrics import metric

pytestmark = [pytest.mark.anyio, pytest.mark.application(MAIN)]

TRAJECTORIES = DATA / "tau-bench" / "gpt-4o-airline.json.gz"
REPLAYED = 12
LONGEST_TURNS = 8


@pytest.mark.skipif(not TRAJECTORIES.exists(), reason=f"no recorded conversations at {DATA}")
async def test_recorded_conversations_without_ids(
    application: str, client: httpx.AsyncClient
) -> None:
    """Replayed turn by turn with the model's own answers, all at the same time."""
    with gzip.open(TRAJECTORIES, "rt") as file:
        recorded = [entry["traj"] for entry in json.load(file)]
    chosen = recorded[:: len(recorded) // REPLAYED][:REPLAYED]

    async def replay(trajectory: list[Message]) -> set[str]:
        said: list[Message] = []
        names, turns = set(), 0
        for message in trajectory:
            if message["role"] == "assistant":
                reply = await chat(client, said, tokens=16, stream=turns % 2 == 0)
                assert reply.status == 200, reply.body
                names.add(reply.conversation)
                said.append({"role": "assistant", "content": reply.content})
                turns += 1
                if turns == LONGEST_TURNS:
                    break
            else:
                said.append(message)
        assert turns >= 3
        return names

    names = await asyncio.gather(*map(replay, chosen))
    assert all(len(seen) == 1 for seen in names)
    assert len(set.union(*names)) == REPLAYED
    assert metric("conserve_conversations") == REPLAYED


async def test_a_hundred_conversations_with_the_same_beginning(
    application: str, client: httpx.AsyncClient, rng: random.Random
) -> None:
    """Same system prompt, and for half of them the same first message and answer: never mixed."""
    system = {"role": "system", "content": prose(rng, 60)}
    same = prose(rng, 20)
    agents = [Agent(client, None, [system]) for _ in range(100)]
    for turn in range(3):
        contents = [
            same if turn == 0 and number < 50 else f"{number}: {prose(rng, 10)}"
            for number in range(100)
        ]
        await asyncio.gather(
            *(agent.say(content, tokens=4) for agent, content in zip(agents, contents, strict=True))
        )
    names = [{reply.conversation for reply in agent.replies} for agent in agents]
    # Those with the same first message and answer are the same until their second turn: which
    # of the waiting conversations each then continues is a toss-up, but never one already taken.
    later = [{reply.conversation for reply in agent.replies[1:]} for agent in agents]
    assert all(len(seen) == 1 for seen in later)
    assert len(set.union(*later)) == 100
    assert all(len(seen) == 1 for seen in names[50:])
    assert metric("conserve_conversations") == 100
