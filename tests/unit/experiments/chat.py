"""A chat server for agents: it streams as many tokens as it is asked for, and keeps what it saw."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any, NamedTuple

from aiohttp import web


class Seen(NamedTuple):
    """A request for an answer."""

    conversation: str
    body: dict[str, Any]
    headers: dict[str, str]


class Chat:
    """The server.

    Attributes:
        refuses: statuses for the next requests, the last one first.
        tokens: of each answer; None: as many as are asked for.
        token_s: time between tokens.
        decoders: which decoder each new conversation lives on, in turns.
    """

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.ended: list[str] = []
        self.refuses: list[int] = []
        self.tokens: int | None = None
        self.token_s = 0.002
        self.decoders = ["decoder#0"]
        self._lives_on: dict[str, str] = {}
        self._numbers = count()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        headers = dict(request.headers)
        name = headers.get("X-Conversation-Id", f"unnamed-{next(self._numbers)}")
        self.seen.append(Seen(name, body, headers))
        if self.refuses:
            return web.json_response({"error": "full"}, status=self.refuses.pop())
        if body["messages"] == [] or "temperature" not in body:
            return web.json_response({"error": "bad"}, status=400)
        if name not in self._lives_on:
            self._lives_on[name] = self.decoders[len(self._lives_on) % len(self.decoders)]
        tokens = self.tokens or body["max_tokens"]
        length = sum(len(str(one["content"]).split()) for one in body["messages"])
        usage = {"completion_tokens": tokens, "total_tokens": length + tokens}
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream",
                "x-conserve-decoder": self._lives_on[name],
                "x-conversation-id": name,
            }
        )
        await response.prepare(request)
        await self._event(response, {"choices": [{"delta": {"role": "assistant"}}]})
        for number in range(tokens):
            await self._event(response, {"choices": [{"delta": {"content": f"{number} "}}]})
            await asyncio.sleep(self.token_s)
        await self._event(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _event(self, response: web.StreamResponse, event: Any) -> None:
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    async def end(self, request: web.Request) -> web.Response:
        self.ended.append(request.match_info["name"])
        return web.json_response({})

    async def look(self, request: web.Request) -> web.Response:
        assert request.match_info["name"] in self._lives_on
        times_s = {"encode_wait_s": 0.001, "encode_s": 0.005, "prefill_s": 0.002}
        return web.json_response({"last_turn": {"lmcache_tokens": 128, **times_s}})

    async def serve(self, play: Callable[[str], Awaitable[Any]]) -> Any:
        """Serve while a coroutine plays against the URL that it is given; returns its result."""
        application = web.Application()
        application.router.add_post("/v1/chat/completions", self.answer)
        application.router.add_delete("/v1/conversations/{name}", self.end)
        application.router.add_get("/v1/conversations/{name}", self.look)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            return await play(f"http://127.0.0.1:{runner.addresses[0][1]}")
        finally:
            await runner.cleanup()

    def run(self, play: Callable[[str], Awaitable[Any]]) -> Any:
        """As `serve`, in an event loop of its own."""
        return asyncio.run(self.serve(play))
