"""The demonstration's agents, on a server that has one tool called, and then takes the answer."""

import asyncio
import json
import os
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from conserve_lab.cli.demo import agents
from conserve_lab.cli.demo.kill import RouterKill
from conserve_lab.cli.demo.seen import Demonstration


@dataclass
class Server:
    """Notes what each conversation asks beside its turns, in order."""

    asked: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    arguments: str = "{}"
    bodies: list[dict[str, Any]] = field(default_factory=list)
    killed: bool = False

    async def turn(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        name = request.headers.get("X-Conversation-Id", "recognised")
        self.asked.append((name, "turn", {}))
        self.bodies.append(body)
        if body["messages"][-1]["role"] == "user":
            tool = body["tools"][0]["function"]["name"]
            call = {"index": 0, "id": f"call-{len(self.asked)}", "type": "function"}
            function = {"name": tool, "arguments": self.arguments}
            delta = {"tool_calls": [{**call, "function": function}]}
        else:
            delta = {"content": "It is 7."}
        headers = {"x-conversation-id": name, "x-conserve-decoder": "d1"}
        response = web.StreamResponse(headers={**headers, "Content-Type": "text/event-stream"})
        await response.prepare(request)
        chunk = {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": "m"}
        chunk |= {"choices": [{"index": 0, "delta": delta, "finish_reason": "stop"}]}
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await asyncio.sleep(0.05)
        if self.killed and request.transport:
            self.killed = False
            request.transport.close()
        else:
            await response.write(b"data: [DONE]\n\n")
        return response

    async def other(self, request: web.Request) -> web.Response:
        name, what = request.match_info["name"], request.match_info.get("what", "")
        if request.method == "GET":
            counted = ("prompt_tokens", "decoder_cached_tokens", "lmcache_tokens", "output_tokens",
                       "encoded_images", "node_images", "encode_wait_s", "encode_s", "prefill_s",
                       "decode_s")  # fmt: skip
            return web.json_response({"last_turn": dict.fromkeys(counted, 1), "data": []})
        body = await request.json() if request.method == "POST" else {}
        self.asked.append((name, f"{request.method} {what}".strip(), body))
        return web.json_response({})

    async def converse(self, kills: bool = False, **seeing: bool) -> Demonstration:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.turn)
        app.router.add_route("*", "/v1/conversations/{name}", self.other)
        app.router.add_route("*", "/v1/conversations/{name}/{what}", self.other)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        kill = RouterKill(port, after=1) if kills else None
        how: dict[str, Any] = {**seeing, "kill": kill}
        try:
            return await agents.converse(
                f"http://127.0.0.1:{port}", "m", 2, 2, lambda row: None, **how
            )
        finally:
            await runner.cleanup()


async def test_an_agent_with_a_name_tells_of_its_tools_and_of_its_end() -> None:
    server = Server()
    seen = await server.converse()
    assert seen.problems == []
    assert sorted({row.conversation for row in seen.turns}) == ["agent-1", "agent-2 (no id)"]
    told = [(what, body) for name, what, body in server.asked if name == "agent-1"]
    assert [what for what, _ in told] == ["turn", "POST tools", "POST tools", "turn", "DELETE"]
    start, end = told[1][1], told[2][1]
    assert (start["event"], end["event"]) == ("start", "end")
    assert start["tool"] == end["tool"]
    assert start["call_id"] == end["call_id"]
    assert end["wall_s"] > 0
    # Of another nobody hears more than its turns.
    assert {what for name, what, _ in server.asked if name != "agent-1"} == {"turn"}


async def test_agents_that_see_click_and_the_second_half_is_shown_the_same_afterwards() -> None:
    server = Server(arguments='{"x": 0, "y": 0}')
    seen = await server.converse(seeing=True)
    assert seen.problems == []
    rows = [(row.conversation, row.turn, row.images, row.does) for row in seen.turns]
    first, again = "agent-1", "agent-2 (no id)"
    assert rows == [
        (first, 1, 1, "click(0, 0)"),
        (first, 2, 2, "answers"),
        (again, 1, 1, "click(0, 0)"),
        (again, 2, 2, "answers"),
    ]
    assert [name for name, what, _ in server.asked if what == "turn"] == [
        *["agent-1"] * 2, *["recognised"] * 2,
    ]  # fmt: skip
    # Neither hit anything; both were shown the same two screens, with other words around them.
    assert (seen.images, seen.clicks, seen.hits) == (2, 2, 0)
    shown = [[m["content"] for m in body["messages"]] for body in server.bodies]
    assert [content[1][1] for content in shown] == [shown[0][1][1]] * 4
    assert shown[1][3] == shown[3][3] != shown[0][1][1:]
    assert shown[0][0] + shown[0][1][0]["text"] != shown[2][0] + shown[2][1][0]["text"]
    assert [answer.right for answer in seen.answers] == [False, False]


async def test_a_turn_is_sent_again_whose_router_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    server, shown = Server(), iter(([100, 1], [108, 2]))

    async def counters(_: Any) -> list[int]:
        return next(shown)

    monkeypatch.setattr(agents, "counters", counters)
    monkeypatch.setattr(os, "kill", lambda pid, _: setattr(server, "killed", pid == os.getpid()))
    seen = await server.converse(kills=True)
    assert [row.again for row in seen.turns].count(1) == seen.again == seen.rejoined == 1
    # Each of the four turns has a token, and a handoff, whose prefill made one.
    assert (len(seen.turns), seen.generated_tokens, seen.twice_tokens) == (4, 8, 0)
