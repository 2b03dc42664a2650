"""Agents: what they send, what they read of answers, and what they do when they are refused."""

import json
from typing import Any

import pytest

from experiments.agents import Agent, Refused, Shape, ask, clients
from tests.unit.experiments.chat import Chat

SHAPE = Shape(first_words=20, later_words=5, output_tokens=3, turns=3)


@pytest.fixture
def server() -> Chat:
    return Chat()


def test_a_conversation_repeats_itself_and_then_another_begins(server: Chat) -> None:
    async def play(url: str) -> list[int]:
        async with clients() as session:
            agent = Agent(session, url, "seed", shape=SHAPE)
            held = []
            for _ in range(4):
                await agent.turn()
                held.append(agent.held_tokens)
            return held

    # What the next turn repeats; after the third nothing, since that is a conversation's last.
    assert server.run(play) == [23, 31, 0, 23]
    assert [one.conversation for one in server.seen] == ["seed-1"] * 3 + ["seed-2"]
    bodies = [one.body for one in server.seen]
    assert bodies[2]["messages"][:3] == bodies[1]["messages"]
    assert bodies[1]["messages"][1] == {"role": "assistant", "content": "0 1 2 "}
    assert bodies[3]["messages"][0] != bodies[0]["messages"][0]
    assert {body["min_tokens"] for body in bodies} == {3}


def test_a_warm_turn_is_behind_another_one(server: Chat) -> None:
    async def play(url: str) -> Any:
        async with clients() as session:
            agent = Agent(session, url, "seed", shape=SHAPE)
            answer = await agent.warm_turn()
            assert len(server.seen) == 2
            await agent.prepare()
            assert len(server.seen) == 2
            await agent.turn()
            # A new conversation's first turn, and one behind it, whose blocks are where it lives.
            await agent.prepare()
            return answer

    answer = server.run(play)
    assert len(server.seen) == 5
    assert 0 < answer.ttft_s < answer.ended_s - answer.sent_s
    assert len(answer.gaps_s) == len(answer.arrivals_s) - 1
    assert sum(answer.gaps_s) == pytest.approx(answer.arrivals_s[-1] - answer.arrivals_s[0])


def test_a_refused_turn_is_sent_again_where_somebody_waits_for_it(server: Chat) -> None:
    seen: list[int] = []

    async def wait(status: int) -> None:
        seen.append(status)

    async def play(url: str) -> None:
        async with clients() as session:
            await Agent(session, url, "seed", shape=SHAPE, on_refused=wait).turn()
            server.refuses = [500]
            with pytest.raises(Refused, match=r"500 b'\{\"error\": \"full\"\}'"):
                await Agent(session, url, "other", shape=SHAPE).turn()

    server.refuses = [429, 503]
    server.run(play)
    assert seen == [503, 429]
    assert len({json.dumps(one.body) for one in server.seen[:3]}) == 1


def test_an_answer_of_another_length_is_no_result(server: Chat) -> None:
    async def play(url: str) -> None:
        async with clients() as session:
            await Agent(session, url, "seed", shape=SHAPE).turn()

    server.tokens = 2
    with pytest.raises(RuntimeError, match="2 tokens, not 3"):
        server.run(play)


def test_what_is_none_is_left_out_of_the_body(server: Chat) -> None:
    async def play(url: str) -> None:
        async with clients() as session:
            headers = {"X-Conversation-Id": "c"}
            messages = [{"role": "user", "content": "hello"}]
            await ask(session, url, messages, 3, headers, stream_options=None, cache_salt="s")

    server.run(play)
    ((_, body, _),) = server.seen
    assert "stream_options" not in body
    assert body["cache_salt"] == "s"
