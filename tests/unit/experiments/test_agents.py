"""Agents: what they send, what they read of answers, and what they do when they are refused."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from experiments.agents import Agent, Refused, Shape, ask, clients

SHAPE = Shape(first_words=20, later_words=5, output_tokens=3, turns=3)
Play = Callable[[str], Awaitable[Any]]


class Server:
    """Streams answers of three tokens; refuses some turns; keeps what it was sent."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any]] = []
        self.refuses: list[int] = []
        self.tokens = 3

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.seen.append((request.headers["X-Conversation-Id"], body))
        if self.refuses:
            return web.json_response({"error": "full"}, status=self.refuses.pop())
        length = sum(len(one["content"].split()) for one in body["messages"])
        usage = {"completion_tokens": self.tokens, "total_tokens": length + self.tokens}
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        events: list[Any] = [{"choices": [{"delta": {"role": "assistant"}}]}]
        events += [{"choices": [{"delta": {"content": f"{n} "}}]} for n in range(self.tokens)]
        for event in [*events, {"choices": [], "usage": usage}]:
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            await asyncio.sleep(0.01)
        await response.write(b"data: [DONE]\n\n")
        return response

    def run(self, play: Play) -> Any:
        async def served() -> Any:
            application = web.Application()
            application.router.add_post("/v1/chat/completions", self.answer)
            runner = web.AppRunner(application)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            try:
                return await play(f"http://127.0.0.1:{runner.addresses[0][1]}")
            finally:
                await runner.cleanup()

        return asyncio.run(served())


@pytest.fixture
def server() -> Server:
    return Server()


def test_a_conversation_repeats_itself_and_then_another_begins(server: Server) -> None:
    async def play(url: str) -> list[int]:
        async with clients() as session:
            agent = Agent(session, url, "seed", SHAPE)
            held = []
            for _ in range(4):
                await agent.turn()
                held.append(agent.held_tokens)
            return held

    # What the next turn repeats; after the third nothing, since that is a conversation's last.
    assert server.run(play) == [23, 31, 0, 23]
    assert [name for name, _ in server.seen] == ["seed-1"] * 3 + ["seed-2"]
    bodies = [body for _, body in server.seen]
    assert bodies[2]["messages"][:3] == bodies[1]["messages"]
    assert bodies[1]["messages"][1] == {"role": "assistant", "content": "0 1 2 "}
    assert bodies[3]["messages"][0] != bodies[0]["messages"][0]
    assert {body["min_tokens"] for body in bodies} == {3}


def test_a_warm_turn_is_behind_another_one(server: Server) -> None:
    async def play(url: str) -> Any:
        async with clients() as session:
            agent = Agent(session, url, "seed", SHAPE)
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


def test_a_refused_turn_is_sent_again_where_somebody_waits_for_it(server: Server) -> None:
    seen: list[int] = []

    async def wait(status: int) -> None:
        seen.append(status)

    async def play(url: str) -> None:
        async with clients() as session:
            await Agent(session, url, "seed", SHAPE, on_refused=wait).turn()
            server.refuses = [500]
            with pytest.raises(Refused, match=r"500 b'\{\"error\": \"full\"\}'"):
                await Agent(session, url, "other", SHAPE).turn()

    server.refuses = [429, 503]
    server.run(play)
    assert seen == [503, 429]
    assert len({json.dumps(body) for _, body in server.seen[:3]}) == 1


def test_an_answer_of_another_length_is_no_result(server: Server) -> None:
    async def play(url: str) -> None:
        async with clients() as session:
            await Agent(session, url, "seed", SHAPE).turn()

    server.tokens = 2
    with pytest.raises(RuntimeError, match="2 tokens, not 3"):
        server.run(play)


def test_what_is_none_is_left_out_of_the_body(server: Server) -> None:
    async def play(url: str) -> None:
        async with clients() as session:
            headers = {"X-Conversation-Id": "c"}
            messages = [{"role": "user", "content": "hello"}]
            await ask(session, url, messages, 3, headers, stream_options=None, cache_salt="s")

    server.run(play)
    ((_, body),) = server.seen
    assert "stream_options" not in body
    assert body["cache_salt"] == "s"
