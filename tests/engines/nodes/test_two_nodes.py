"""A prefiller on one node, decoders on another: one handoff across; a lost node loses nothing.

The nodes are Ray's own, on one machine, each with an LMCache server of its own.
"""

import random
from pathlib import Path

import httpx
import pytest

from tests.engines.applications import START_S
from tests.engines.client import BLOCK_TOKENS, Agent, Message, engines, lone_answer, prose
from tests.engines.lone import lone_engine, wait_for_lone
from tests.engines.metrics import metric
from tests.engines.nodes.nodes import crossed, two_nodes
from tests.engines.processes import kill
from tests.engines.waiting import eventually

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("machine_alone")]

OUTPUT_TOKENS = 16
SAYS = 5
WORDS = {"long": 3000, "medium": 900, "short": 300}


def _whole(tokens: int) -> int:
    return tokens // BLOCK_TOKENS * BLOCK_TOKENS


def _says(rng: random.Random) -> dict[str, list[str]]:
    return {
        name: [prose(rng, words), *(prose(rng, 60) for _ in range(SAYS - 1))]
        for name, words in WORDS.items()
    }


async def _lone_answers(
    client: httpx.AsyncClient, logs: Path, says: dict[str, list[str]]
) -> dict[str, list[str]]:
    """What a lone engine answers in the same conversations; it is gone before the nodes come."""
    lone = lone_engine(logs / "lone.log")
    try:
        wait_for_lone(lone, logs)
        answers: dict[str, list[str]] = {}
        for name, contents in says.items():
            messages: list[Message] = []
            for content in contents:
                messages.append({"role": "user", "content": content})
                answer = await lone_answer(client, messages, OUTPUT_TOKENS)
                messages.append({"role": "assistant", "content": answer})
            answers[name] = [message["content"] for message in messages[1::2]]
        return answers
    finally:
        lone.stop()


async def _handed_over(agent: Agent, content: str) -> None:
    """A turn whose prompt was prefilled on the first node and taken from there, all of it."""
    await agent.say(content, tokens=OUTPUT_TOKENS)
    stats = agent.stats[-1]
    assert stats["lmcache_tokens"] == _whole(stats["prompt_tokens"] - 1) > 0
    assert stats["decoder_cached_tokens"] == 0


async def _at_home(agent: Agent, content: str) -> None:
    """A turn that its decoder serves from its own cache."""
    held = agent.stats[-1]["prompt_tokens"] + agent.stats[-1]["output_tokens"]
    await agent.say(content, tokens=OUTPUT_TOKENS)
    assert agent.stats[-1]["lmcache_tokens"] == 0
    assert agent.stats[-1]["decoder_cached_tokens"] == _whole(held - 1)


@pytest.mark.long
async def test_handoffs_cross_once_and_a_lost_node_costs_no_conversation(
    client: httpx.AsyncClient, rng: random.Random, tmp_path: Path
) -> None:
    says = _says(rng)
    expected = await _lone_answers(client, tmp_path, says)
    with two_nodes(tmp_path) as nodes, nodes.application():
        agents = {name: Agent(client, name) for name in WORDS}
        where = {engine["role"]: nodes.is_on_second(engine["pid"]) for engine in engines()}
        assert where == {"prefiller": False, "decoder": True}
        servers = nodes.servers()
        assert set(servers) == {"first", "second"}

        for name, agent in agents.items():
            await _handed_over(agent, says[name][0])
        for name, agent in agents.items():
            await _at_home(agent, says[name][1])
        assert metric("conserve_handoffs_total") == len(agents)
        # As the servers count: every chunk went over once, and none the other way.
        chunks = sum(agent.stats[0]["lmcache_tokens"] for agent in agents.values()) // BLOCK_TOKENS
        await eventually(
            "every chunk counted by the server that took it",
            lambda: crossed(servers["second"]) >= chunks,
        )
        assert crossed(servers["second"]) == chunks
        assert crossed(servers["first"]) == 0

        # The second node's actor dies, and its LMCache server with it.
        kill(nodes.node_actor().pid)
        for name, agent in agents.items():
            await _at_home(agent, says[name][2])
        await eventually(
            "a new LMCache server on the second node",
            lambda: nodes.servers().get("second", servers["second"]) != servers["second"],
            timeout_s=120,
        )
        await _until_handoffs_cross(client, rng)

        # The whole node dies. Until there is another, turns are refused, not lost.
        nodes.lose_second_node()
        refused = await agents["long"].ask(tokens=OUTPUT_TOKENS)
        assert refused.status == 503, refused.body
        assert refused.body["error"]["message"]
        nodes.add_second_node()
        await eventually(
            "two decoders on the new node",
            lambda: len(engines("decoder")) == 2,
            timeout_s=START_S,
        )
        await _until_handoffs_cross(client, rng)
        for name, agent in agents.items():
            await _handed_over(agent, says[name][3])
        for name, agent in agents.items():
            await _at_home(agent, says[name][4])

        for name, agent in agents.items():
            assert [reply.content for reply in agent.replies] == expected[name]


async def _until_handoffs_cross(client: httpx.AsyncClient, rng: random.Random) -> None:
    """A restarted server and the others find each other within seconds."""
    for _ in range(60):
        agent = Agent(client)
        await agent.say(prose(rng, 300), tokens=4)
        if agent.stats[0]["lmcache_tokens"]:
            return
    pytest.fail("no handoff crossed nodes again")
