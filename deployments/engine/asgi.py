"""Reads bodies ahead and replays them, for the ASGI middlewares of an engine's HTTP server."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from starlette.types import Message, Receive

_T = TypeVar("_T")

# The member of a turn's ASGI scope with its `TurnKey`.
TURN = "conserve.turn"
# The member with what marks in its body stand for; see `conserve.media.Lifted`.
MEDIA = "conserve.media"
_SMALL_BYTES = 16 * 1024
# Longer bodies are joined in a thread, beside other turns' tokens.
_PIECE_BYTES = 256 * 1024


async def read_ahead(receive: Receive) -> bytes:
    """Return the whole body, or what there is of it where the client leaves."""
    parts = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            break
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            break
    if sum(map(len, parts)) > _PIECE_BYTES:
        return await asyncio.to_thread(b"".join, parts)
    return b"".join(parts)


def replay(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that first gives a body that was read already."""
    given = False

    async def replayed() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


async def aside(work: Callable[[bytes], _T], body: bytes) -> _T:
    """Do work on a body, in a thread if it is long: this one passes other turns' tokens on."""
    if len(body) <= _SMALL_BYTES:
        return work(body)
    return await asyncio.to_thread(work, body)


def is_stream(start: Message) -> bool:
    """Return whether an answer is a stream of events, by its first message."""
    return any(
        name.lower() == b"content-type" and value.startswith(b"text/event-stream")
        for name, value in start["headers"]
    )
