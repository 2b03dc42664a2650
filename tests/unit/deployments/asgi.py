"""Asks ASGI applications without a server and with one, and reads turns as a router does."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn

from conserve.models import Names
from conserve.settings import Settings
from deployments.router.media import MediaReader
from deployments.router.request import ClientRequest, read_request
from deployments.router.stored import StoredResponses
from deployments.router.turn import TurnEndpoint


def ask(
    app: Any, method: str, path: str, host: str = "127.0.0.1", peer: str = "127.0.0.1", **given: Any
) -> httpx.Response:
    """Return the answer to a request, as `httpx` sends it."""

    async def answer() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False, client=(peer, 5000))
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as http:
            return await http.request(method, path, **given)

    return asyncio.run(answer())


def encoded(body: Any) -> bytes:
    return body if isinstance(body, bytes) else json.dumps(body).encode()


def receiver(*parts: Any) -> Any:
    """Return a `receive` that has a body's parts, and then a client that waits."""
    left = [
        {"type": "http.request", "body": encoded(part), "more_body": number < len(parts)}
        for number, part in enumerate(parts, 1)
    ]

    async def receive() -> Any:
        return left.pop(0) if left else await asyncio.Event().wait()

    return receive


def scope_of(headers: Any = (), **more: Any) -> dict[str, Any]:
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    raw = [
        (name.lower().encode(), value.encode("latin-1")) if isinstance(name, str) else (name, value)
        for name, value in pairs or ()
    ]
    return {"type": "http", "query_string": b"", "headers": raw, **more}


async def exchanged(app: Any, *parts: Any, **scope: Any) -> list[Any]:
    """Return the messages that an application sends in answer to a body's parts."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope_of(**scope), receiver(*parts), send)
    return sent


def exchange(app: Any, *parts: Any, **scope: Any) -> list[Any]:
    return asyncio.run(exchanged(app, *parts, **scope))


async def respond(send: Any, *parts: bytes, status: int = 200, headers: Any = ()) -> None:
    """Send an answer in these parts, the last of which ends it."""
    start = {"type": "http.response.start", "status": status}
    await send({**start, "headers": scope_of(headers)["headers"]})
    for number, part in enumerate(parts, 1):
        more = number < len(parts)
        await send({"type": "http.response.body", "body": part, "more_body": more})


def told(sent: list[Any]) -> tuple[int, dict[str, str], bytes]:
    """Return the status, headers and body of an answer's messages."""
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], headers, b"".join(one.get("body", b"") for one in sent[1:])


def a_reader(settings: Settings) -> MediaReader:
    return MediaReader(settings, Names(settings, 0.0))


def read_turn(
    path: str, *parts: Any, settings: Settings | None = None, stored: Any = None, **scope: Any
) -> ClientRequest:
    """Return a turn as a router understands it.

    Raises:
        ApiError: the router refuses it.
    """
    media = a_reader(settings or Settings())
    return asyncio.run(read_request(scope_of(path=path, **scope), receiver(*parts), media, stored))


@contextmanager
def listening(config: uvicorn.Config) -> Iterator[int]:
    """Run a server in a thread; gives the port that it listens on."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


def turn_endpoint(settings: Settings, table: Any, upstream: Any, router: str) -> TurnEndpoint:
    """Return a router's endpoint of turns of a single model."""
    stored = StoredResponses(settings, table, upstream)
    finish = getattr(table, "finish", None)
    return TurnEndpoint(settings, table, upstream, router, stored, a_reader(settings), finish)  # type: ignore[arg-type]
