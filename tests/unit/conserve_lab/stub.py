"""A stand-in for an endpoint, which the driver's tests count requests at; and a planned script."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from conserve_lab.records import Answer, TurnRequest

Behaviour = Callable[[web.Request, web.StreamResponse], Awaitable[None]]


@dataclass
class Seen:
    """One request as the stub saw it."""

    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class Stub:
    """Answers every turn with as many tokens as it asks for, or as ``behaviour`` says.

    Attributes:
        behaviour: by the last word of a turn's prompt: what to do instead of answering.
        choose: the same by the request's body; None: it is answered.
        seen: every request but those for the list of models and for counters.
        refuses_deletes: closes the connection when a conversation's end is told.
        counters: makes the page that ``/metrics`` answers; without, there is none.
        hanging: set once a turn gets no further.
    """

    behaviour: dict[str, Behaviour] = field(default_factory=dict)
    choose: Callable[[dict[str, Any]], Behaviour | None] = lambda body: None
    seen: list[Seen] = field(default_factory=list)
    refuses_deletes: bool = False
    counters: Callable[[], str] | None = None
    models: list[str] = field(default_factory=lambda: ["stub-model"])
    url: str = ""
    hanging: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def turns(self) -> list[Seen]:
        return [seen for seen in self.seen if seen.method == "POST"]

    @property
    def released(self) -> list[str]:
        return [seen.path.rsplit("/", 1)[1] for seen in self.seen if seen.method == "DELETE"]

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": name} for name in self.models]})
        if request.path == "/metrics":
            page = self.counters and self.counters()
            return web.Response(text=page) if page is not None else web.Response(status=404)
        body = await request.json() if request.method == "POST" else {}
        self.seen.append(Seen(request.method, request.path, dict(request.headers), body))
        if request.method == "DELETE" and self.refuses_deletes:
            await forget(request, web.StreamResponse())
        if request.method == "DELETE":
            return web.json_response({"deleted": True})
        response = web.StreamResponse(headers={"x-conserve-decoder": "d1"})
        if body["model"] not in self.models:
            return web.json_response({"error": {"message": "no such model"}}, status=404)
        chat = "messages" in body
        prompt = "messages" if chat else str(body["prompt"])
        special = self.behaviour.get(prompt.split()[-1]) or self.choose(body)
        if special is hang:
            self.hanging.set()
        if special is not None:
            await special(request, response)
            return response
        await response.prepare(request)
        for _ in range(body["max_tokens"]):
            part = {"delta": {"content": "x"}} if chat else {"text": "x"}
            await say(response, {"choices": [{"index": 0, "finish_reason": None, **part}]})
        usage = {
            "prompt_tokens": len(body["messages" if chat else "prompt"]),
            "completion_tokens": body["max_tokens"],
            "prompt_tokens_details": {"cached_tokens": 1},
        }
        await say(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response


async def say(response: web.StreamResponse, chunk: dict[str, Any]) -> None:
    """Send one event."""
    await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")


async def refuse(request: web.Request, response: web.StreamResponse) -> None:
    """Answer with an error, as a server does that is full."""
    response.set_status(429)
    await response.prepare(request)
    await response.write(b'{"error": {"message": "full; try again later"}}')


def streams(*parts: dict[str, Any], end: str = "done") -> Behaviour:
    """Stream these events, and end with ``[DONE]``, without it, or with a closed connection.

    Args:
        end: ``done``, ``silent`` or ``closed``.
    """

    async def answer(request: web.Request, response: web.StreamResponse) -> None:
        await response.prepare(request)
        for part in parts:
            await say(response, part)
        if end == "closed":
            await forget(request, response)
        elif end == "done":
            await response.write(b"data: [DONE]\n\n")

    return answer


def token(finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": "x", "finish_reason": finish_reason}]}


async def forget(request: web.Request, response: web.StreamResponse) -> None:
    """Close the connection without an answer."""
    assert request.transport is not None
    request.transport.close()


async def hang(request: web.Request, response: web.StreamResponse) -> None:
    """Send one token and then nothing."""
    await response.prepare(request)
    await say(response, token())
    await asyncio.sleep(60)


@asynccontextmanager
async def serving(stub: Stub) -> AsyncIterator[Stub]:
    """Serve the stub on a free port of this machine."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", stub._handle)
    runner = web.AppRunner(app, shutdown_timeout=0, handler_cancellation=True)
    await runner.setup()
    # As servers have it: of a thousand connections at once, none is left to try again later.
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=2048)
    await site.start()
    assert runner.addresses
    stub.url = "http://{}:{}".format(*runner.addresses[0][:2])
    try:
        yield stub
    finally:
        await runner.cleanup()


@dataclass
class Planned:
    """A script of fixed turns: gap in seconds, prompt, and whether its output is for the user."""

    conversation: str
    turns: Sequence[tuple[float, str, bool | None]]
    answers: list[Answer | None] = field(default_factory=list)
    tokens: int = 3

    def next(self, answer: Answer | None) -> TurnRequest | None:
        self.answers.append(answer)
        number = len(self.answers) - 1
        if number == len(self.turns):
            return None
        gap_s, prompt, effective = self.turns[number]
        return TurnRequest(
            gap_s,
            "/v1/completions",
            lambda: {"prompt": prompt, "max_tokens": self.tokens, "stream": True},
            prompt_tokens=len(prompt),
            reused_tokens=number,
            output_tokens=self.tokens,
            effective=effective,
        )


@contextmanager
def served(stub: Stub) -> Iterator[Stub]:
    """The stub in a thread of its own; the command has an event loop of its own."""
    loop = asyncio.new_event_loop()
    up, down = threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with serving(stub):
            up.set()
            await down.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert up.wait(10)
    try:
        yield stub
    finally:
        loop.call_soon_threadsafe(down.set)
        thread.join(10)
        loop.close()
