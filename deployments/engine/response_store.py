"""Responses that a decoder has given, kept where their histories are bound.

A client may ask for a response again, or go on from it by its id alone (``previous_response_id``);
the router then asks the decoders for it. vLLM 0.29 has a store of its own, which it never clears,
and from which it takes a history without its tool calls; this one is bounded, and keeps what the
client would have had to send.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from conserve import identity, wire
from conserve.apis import RESPONSES, form_of
from conserve.history import TurnKey
from deployments.engine.body import TURN, read_ahead, replay
from deployments.engine.response_events import AgreeingResponse

_SMALL_BYTES = 16 * 1024
_MB = 1_000_000
# Hundreds of histories of the length that clients continue by a response's id.
ROOM_MB = 64
# Beside the bytes that it holds: the entry itself, its key, its ids.
_ENTRY_BYTES = 512


class _Asked(msgspec.Struct, gc=False):
    request_id: str = ""
    store: bool | None = True
    # As they came: vLLM judges them, or passes them over.
    safety_identifier: Any = None
    prompt_cache_key: Any = None


class _Event(msgspec.Struct, gc=False):
    response: msgspec.Raw


class _Given(msgspec.Struct, gc=False):
    status: str = ""


_ASKED = msgspec.json.Decoder(_Asked)
_EVENT = msgspec.json.Decoder(_Event)
_GIVEN = msgspec.json.Decoder(_Given)
_STORED = ("completed", "incomplete")


@dataclass(frozen=True, slots=True)
class _Entry:
    history_id: str
    request: bytes
    response: bytes

    @property
    def size(self) -> int:
        return len(self.request) + len(self.response) + _ENTRY_BYTES


class ResponseStore:
    """Responses by tenant and id, the newest of them, as far as there is room.

    Args:
        room_bytes: how much they may take, requests included.
    """

    def __init__(self, room_bytes: int) -> None:
        self._room = room_bytes
        self._used = 0
        self._entries: OrderedDict[tuple[str | None, str], _Entry] = OrderedDict()

    def add(self, response_id: str, history_id: str, request: bytes, response: bytes) -> None:
        """Keep a response, in the place of older ones where there is no room.

        Args:
            history_id: as it is kept, which says whose it is.
            request: JSON, as is ``response``.
        """
        entry = _Entry(history_id, request, response)
        if entry.size > self._room:
            return
        key = identity.tenant_of(history_id), response_id
        self.discard(*key)
        self._entries[key] = entry
        self._used += entry.size
        while self._used > self._room:
            self.discard(*next(iter(self._entries)))

    def get(self, tenant: str | None, response_id: str) -> bytes | None:
        """A `wire.StoredResponse` in JSON; None if there is none, or not of this tenant."""
        entry = self._entries.get((tenant, response_id))
        if entry is None:
            return None
        request, response = msgspec.Raw(entry.request), msgspec.Raw(entry.response)
        return msgspec.json.encode(wire.StoredResponse(entry.history_id, request, response))

    def discard(self, tenant: str | None, response_id: str) -> bool:
        """Forget a response; whether there was one."""
        entry = self._entries.pop((tenant, response_id), None)
        if entry is None:
            return False
        self._used -= entry.size
        return True


class ResponseKeeper:
    """ASGI middleware before a decoder's HTTP app: keeps its responses, and tells them to routers.

    What it keeps is what the client was told, see `deployments.engine.response_events`.

    Args:
        room_mb: how much they may take.
    """

    def __init__(self, app: ASGIApp, room_mb: int = ROOM_MB) -> None:
        self._app = app
        self._store = ResponseStore(room_mb * _MB)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if scope["path"].startswith(wire.STORED_PREFIX):
            await self._tell(scope, headers)(scope, receive, send)
            return
        key: TurnKey | None = scope.get(TURN)
        if scope["path"] != RESPONSES or scope["method"] != "POST" or key is None:
            await self._app(scope, receive, send)
            return
        request = await read_ahead(receive)
        # Other turns' tokens pass through this thread.
        if len(request) <= _SMALL_BYTES:
            asked = _asked(request)
        else:
            asked = await asyncio.to_thread(_asked, request)
        if asked is not None and asked.request_id:
            keeps = asked.store is not False

            def keep(response: bytes) -> None:
                self._store.add(asked.request_id, key.history_id, request, response)

            if keeps:
                send = _watched(send, keep)
            send = AgreeingResponse(send, asked.request_id, _left_out(asked, keeps)).send
        await self._app(scope, replay(request, receive), send)

    def _tell(self, scope: Scope, headers: Headers) -> Response:
        key = headers.get(wire.TENANT_HEADER), scope["path"].removeprefix(wire.STORED_PREFIX)
        if scope["method"] == "DELETE":
            return Response(status_code=204 if self._store.discard(*key) else 404)
        found = self._store.get(*key)
        if found is None:
            return Response(status_code=404)
        return Response(found, media_type="application/json")


def _asked(request: bytes) -> _Asked | None:
    try:
        return _ASKED.decode(request)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None  # The engine refuses it.


def _left_out(asked: _Asked, keeps: bool) -> dict[str, Any]:
    """Return what OpenAI's clients may look for in a response, and vLLM 0.29 does not say."""
    return {
        "store": keeps,
        "error": None,
        "completed_at": None,
        "safety_identifier": asked.safety_identifier,
        "prompt_cache_key": asked.prompt_cache_key,
        "text": {"format": {"type": "text"}},
        "top_logprobs": 0,
    }


def _watched(send: Send, keep: Callable[[bytes], None]) -> Send:
    """A ``send`` that has a whole response kept before the client learns that it is whole."""
    ends = form_of(RESPONSES).ends
    good = streamed = False
    parts: list[bytes] = []

    async def watched(message: Message) -> None:
        nonlocal good, streamed
        if message["type"] == "http.response.start":
            good = message["status"] == 200
            types = [value for name, value in message["headers"] if name.lower() == b"content-type"]
            streamed = any(value.startswith(b"text/event-stream") for value in types)
        elif good and message["type"] == "http.response.body":
            part = message.get("body", b"")
            response: bytes | None = None
            if not streamed:
                parts.append(part)
                response = None if message.get("more_body") else b"".join(parts)
            elif part.startswith(ends):
                response = bytes(_EVENT.decode(part.partition(b"data: ")[2]).response)
            if response is not None and _GIVEN.decode(response).status in _STORED:
                keep(response)
        await send(message)

    return watched
