"""Keeps responses that a decoder has given where their histories are bound.

A client may ask for a response again, or go on from it by its id alone (``previous_response_id``).
The router then asks the decoders for it. vLLM 0.29's own store is never cleared, and gives back a
history without its tool calls. This one is bounded, and keeps what the client would have sent.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from conserve import identity, wire
from conserve.apis import RESPONSES, form_of
from conserve.history import TurnKey
from deployments.engine.response_events import AgreeingResponse, is_stream

_T = TypeVar("_T")

# The member of a turn's ASGI scope with its `TurnKey`.
TURN = "conserve.turn"
_SMALL_BYTES = 16 * 1024
_MB = 1_000_000
# Room for hundreds of histories of the length that clients continue by a response's id.
ROOM_MB = 64
# What an entry takes beside the bytes that it holds.
_ENTRY_BYTES = 512


class _Asked(msgspec.Struct, gc=False):
    request_id: str = ""
    store: bool | None = True
    # Unchecked: vLLM judges them, or ignores them.
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
    """The newest responses, by tenant and id, as far as there is room."""

    def __init__(self, room_bytes: int) -> None:
        self._room = room_bytes
        self._used = 0
        self._entries: OrderedDict[tuple[str | None, str], _Entry] = OrderedDict()

    def add(self, response_id: str, history_id: str, request: bytes, response: bytes) -> None:
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
        """Return a `wire.StoredResponse` in JSON; None if the tenant has no such response."""
        entry = self._entries.get((tenant, response_id))
        if entry is None:
            return None
        request, response = msgspec.Raw(entry.request), msgspec.Raw(entry.response)
        return msgspec.json.encode(wire.StoredResponse(entry.history_id, request, response))

    def discard(self, tenant: str | None, response_id: str) -> bool:
        entry = self._entries.pop((tenant, response_id), None)
        if entry is None:
            return False
        self._used -= entry.size
        return True


class ResponseKeeper:
    """ASGI middleware that keeps a decoder's responses, and serves them to routers.

    It keeps what the client was told, see `deployments.engine.response_events`.
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
        asked = await aside(_asked, request)
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
    """Return what OpenAI's clients may read in a response, and vLLM 0.29 leaves out."""
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
    """Return a ``send`` that has a response kept before the client learns that it is complete."""
    ends = form_of(RESPONSES).ends
    good = streamed = False
    parts: list[bytes] = []

    async def watched(message: Message) -> None:
        nonlocal good, streamed
        if message["type"] == "http.response.start":
            good = message["status"] == 200
            streamed = is_stream(message)
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
