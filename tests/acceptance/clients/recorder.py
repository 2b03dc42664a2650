"""A proxy before the router that keeps what a client sends and is told.

It is the proxy, too, that a client is told to reach everything else by: that it refuses, and keeps.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Self
from urllib.parse import quote

import aiohttp
from aiohttp import web
from aiohttp.typedefs import Handler

# Of one connection, not of what it carries.
_HOP = ("host", "connection", "keep-alive", "transfer-encoding", "content-length")
_LONGEST_BODY = 64 * 2**20


class Usage(NamedTuple):
    """An answer's tokens: of its prompt, of those in a cache, and its own."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Exchange:
    """One request and its answer.

    Attributes:
        headers: the request's, by lower-cased name.
        turn: the turn as ``GET /v1/conversations/{id}`` had it before the client had the end of the
            answer; None where the answer names no conversation.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    body: Any
    status: int
    answer_headers: Mapping[str, str]
    answer: bytes
    turn: Mapping[str, Any] | None

    @property
    def conversation(self) -> str:
        """The conversation that the answer names."""
        return self.answer_headers["x-conversation-id"]

    @property
    def decoder(self) -> str:
        """The decoder that the answer names."""
        return self.answer_headers["x-conserve-decoder"]

    @property
    def usage(self) -> Usage:
        """What the answer says of its tokens, or where it does not, the router."""
        if told := _usage(_events(self.answer)):
            return told
        assert self.turn is not None, f"{self.path}: nothing says which tokens were cached"
        return Usage(self.turn["prompt_tokens"], self.found_tokens, self.turn["output_tokens"])

    @property
    def found_tokens(self) -> int:
        """What of the prompt its decoder did not compute: it was in its cache, or came to it."""
        assert self.turn is not None, f"{self.path}: nothing says what was found"
        return int(self.turn["decoder_cached_tokens"] + self.turn["lmcache_tokens"])


class Recorder:
    """The proxy, on a free port of loopback.

    Args:
        target: the router behind it.

    Attributes:
        exchanges: in the order in which they ended.
        outside: what was asked for elsewhere.
    """

    def __init__(self, target: str) -> None:
        self._target = target
        self.exchanges: list[Exchange] = []
        self.outside: list[str] = []
        self.url = ""

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=_LONGEST_BODY, middlewares=[self._within])
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=600), auto_decompress=False
        )
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._runner.cleanup()
        await self._session.close()

    @web.middleware
    async def _within(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        # Of a server, paths are asked for; of a proxy, addresses, for which there is no route.
        if not request.raw_path.startswith("/"):
            self.outside.append(f"{request.method} {request.raw_path}")
            raise web.HTTPForbidden(text="nothing leaves this machine")
        return await handler(request)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP}
        async with self._session.request(
            request.method, self._target + request.raw_path, data=body, headers=headers
        ) as answer:
            passed = web.StreamResponse(
                status=answer.status,
                headers={k: v for k, v in answer.headers.items() if k.lower() not in _HOP},
            )
            await passed.prepare(request)
            parts: list[bytes] = []
            # The last part waits until the turn has been looked up: the next turn follows it.
            async for part in answer.content.iter_any():
                if parts:
                    await passed.write(parts[-1])
                parts.append(part)
            told = _usage(_events(b"".join(parts)))
            turn = await self._turn(answer.headers.get("x-conversation-id"), told)
            self.exchanges.append(
                Exchange(
                    method=request.method,
                    path=request.path,
                    headers={k.lower(): v for k, v in request.headers.items()},
                    body=json.loads(body) if body else None,
                    status=answer.status,
                    answer_headers={k.lower(): v for k, v in answer.headers.items()},
                    answer=b"".join(parts),
                    turn=turn,
                )
            )
            if parts:
                await passed.write(parts[-1])
            await passed.write_eof()
            return passed

    async def _turn(self, conversation: str | None, told: Usage | None) -> Mapping[str, Any] | None:
        """The turn that was answered: of a conversation's histories, the one that says so."""
        if conversation is None:
            return None
        url = f"{self._target}/v1/conversations/{quote(conversation, safe='')}"
        async with self._session.get(url) as answer:
            shown = await answer.json()
        turns = [shown.get("last_turn"), *(one["last_turn"] for one in shown.get("histories", ()))]
        for turn in turns:
            if turn and (told is None or turn["prompt_tokens"] == told.prompt_tokens):
                found: Mapping[str, Any] = turn
                return found
        return None


def _events(answer: bytes) -> Iterator[dict[str, Any]]:
    """The objects that an answer consists of, streamed or not."""
    if answer.startswith(b"{"):
        yield json.loads(answer)
        return
    for line in answer.splitlines():
        if line.startswith(b"data: {"):
            yield json.loads(line.removeprefix(b"data: "))


def _usage(events: Iterable[dict[str, Any]]) -> Usage | None:
    """The usage that events of any of the three APIs tell; None where they do not tell all."""
    told: dict[str, Any] = {}
    for event in events:
        # Responses and Messages also have it within what their events are about.
        for holder in (event, event.get("response"), event.get("message")):
            if isinstance(holder, dict) and isinstance(holder.get("usage"), dict):
                told |= {k: v for k, v in holder["usage"].items() if v is not None}
    if "prompt_tokens_details" in told:
        cached = told["prompt_tokens_details"]["cached_tokens"]
        return Usage(told["prompt_tokens"], cached, told["completion_tokens"])
    if "input_tokens_details" in told:
        cached = told["input_tokens_details"]["cached_tokens"]
        return Usage(told["input_tokens"], cached, told["output_tokens"])
    if "cache_read_input_tokens" in told:
        # Messages' input_tokens are those that were in no cache, nor put into one.
        cached = told["cache_read_input_tokens"]
        prompt = told["input_tokens"] + cached + (told.get("cache_creation_input_tokens") or 0)
        return Usage(prompt, cached, told["output_tokens"])
    return None
