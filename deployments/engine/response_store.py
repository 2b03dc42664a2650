"""Keeps responses that a decoder has given where their histories are bound.

A client may ask for a response again, or go on from it by its id alone (``previous_response_id``).
The router then asks the decoders for it. vLLM 0.29's own store is never cleared, and gives back a
history without its tool calls. This one is bounded, and keeps what the client would have sent. Each
response is kept with its history, and an image once, however many histories have it.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from conserve import identity, wire
from conserve.media import put_back
from conserve.recognition.answers import read
from deployments.engine.response_events import AgreeingResponse

# Sent at a time, between other turns' tokens.
_PIECE_BYTES = 256 * 1024
_MB = 1_000_000
# Room for hundreds of histories of the length that clients continue by a response's id.
ROOM_MB = 64
# Room for the images of as many histories that have all that a request may have.
_LARGEST_HISTORIES = 4
# What an entry takes beside the bytes that it holds.
_ENTRY_BYTES = 512


class Asked(msgspec.Struct, gc=False):
    """The members of a request for a response that its keeper reads."""

    request_id: str = ""
    store: bool | None = True
    # Unchecked: vLLM judges them, or ignores them.
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    text: dict[str, Any] | None = None


_ASKED = msgspec.json.Decoder(Asked)


class Image(NamedTuple):
    """An image in base64, or another long text, and its hash."""

    digest: bytes
    text: bytes


def hashed(media: Mapping[str, bytes]) -> dict[str, Image]:
    """Return what marks stand for, to be kept once; of 40 MB it takes a tenth of a second."""
    return {
        mark: Image(hashlib.blake2b(text, digest_size=20).digest(), text)
        for mark, text in media.items()
    }


@dataclass(slots=True)
class _Images:
    """Images of entries, each once; ``size`` is of all of them, in bytes."""

    size: int = 0
    _texts: dict[bytes, bytes] = field(default_factory=dict)
    _uses: dict[bytes, int] = field(default_factory=dict)

    def add(self, image: Image) -> Image:
        """Count one more entry that has an image; returns the one that is kept."""
        if image.digest not in self._texts:
            self._texts[image.digest] = image.text
            self.size += len(image.text)
        self._uses[image.digest] = self._uses.get(image.digest, 0) + 1
        return Image(image.digest, self._texts[image.digest])

    def drop(self, image: Image) -> None:
        self._uses[image.digest] -= 1
        if not self._uses[image.digest]:
            del self._uses[image.digest]
            self.size -= len(self._texts.pop(image.digest))


@dataclass(frozen=True, slots=True)
class _Entry:
    history_id: str
    request: bytes
    response: bytes
    # By the marks that stand for them in the request.
    images: dict[str, Image]

    @property
    def size(self) -> int:
        return len(self.request) + len(self.response) + _ENTRY_BYTES

    def told(self) -> bytes:
        """Return a `wire.StoredResponse` in JSON."""
        texts = {mark: image.text for mark, image in self.images.items()}
        request, response = msgspec.Raw(self.request), msgspec.Raw(self.response)
        raw = msgspec.json.encode(wire.StoredResponse(self.history_id, request, response))
        return put_back(raw, texts)


class ResponseStore:
    """The newest responses, by tenant and id, as far as there is room.

    Images of requests have room of their own, for their base64.

    Args:
        media_bytes: the most that the media of one request may have.
    """

    def __init__(self, room_bytes: int = ROOM_MB * _MB, media_bytes: int = 0) -> None:
        self._room = room_bytes
        self._images_room = _LARGEST_HISTORIES * media_bytes * 4 // 3
        self._used = 0
        self._images = _Images()
        self._entries: OrderedDict[tuple[str | None, str], _Entry] = OrderedDict()

    def add(
        self,
        response_id: str,
        history_id: str,
        request: bytes,
        response: bytes,
        images: Mapping[str, Image] | None = None,
    ) -> None:
        """Keep a response; ``images`` are what marks in the request stand for."""
        entry = _Entry(history_id, request, response, dict(images or {}))
        images_size = sum(len(text) for text in dict(entry.images.values()).values())
        if entry.size > self._room or images_size > self._images_room:
            return
        for mark, image in entry.images.items():
            entry.images[mark] = self._images.add(image)
        key = identity.tenant_of(history_id), response_id
        self.discard(*key)
        self._entries[key] = entry
        self._used += entry.size
        while self._used > self._room or self._images.size > self._images_room:
            self.discard(*next(iter(self._entries)))

    def get(self, tenant: str | None, response_id: str) -> bytes | None:
        """Return a `wire.StoredResponse` in JSON; None if the tenant has no such response."""
        entry = self._entries.get((tenant, response_id))
        return None if entry is None else entry.told()

    def discard(self, tenant: str | None, response_id: str) -> bool:
        entry = self._entries.pop((tenant, response_id), None)
        if entry is None:
            return False
        self._used -= entry.size
        for image in entry.images.values():
            self._images.drop(image)
        return True

    async def keeping(
        self, send: Send, history_id: str, asked: Asked, request: bytes, media: Mapping[str, bytes]
    ) -> Send:
        """Return a ``send`` that keeps what the client is told (`response_events`).

        Args:
            media: what marks in the request stand for.
        """
        keeps = asked.store is not False
        images: dict[str, Image] = {}
        if keeps and media:
            images = await asyncio.to_thread(hashed, media)

        def keep(response: bytes) -> None:
            if keeps:
                self.add(asked.request_id, history_id, request, response, images)

        return AgreeingResponse(send, asked.request_id, _left_out(asked, keeps), keep).send

    async def tell(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a router's request for a response, or to delete it."""
        headers = Headers(scope=scope)
        key = headers.get(wire.TENANT_HEADER), scope["path"].removeprefix(wire.STORED_PREFIX)
        if scope["method"] == "DELETE":
            status = 204 if self.discard(*key) else 404
            await Response(status_code=status)(scope, receive, send)
            return
        # With its images it may be long.
        found = await asyncio.to_thread(self.get, *key)
        if found is None:
            await Response(status_code=404)(scope, receive, send)
            return
        told = Headers({"content-type": "application/json", "content-length": str(len(found))})
        await send({"type": "http.response.start", "status": 200, "headers": told.raw})
        for at in range(0, len(found), _PIECE_BYTES):
            part, more = found[at : at + _PIECE_BYTES], at + _PIECE_BYTES < len(found)
            await send({"type": "http.response.body", "body": part, "more_body": more})


def read_asked(request: bytes) -> Asked | None:
    """Return what is read of a request; None: the engine refuses it."""
    return read(_ASKED, request)


def _left_out(asked: Asked, keeps: bool) -> dict[str, Any]:
    """Return what OpenAI's clients may read in a response, and vLLM 0.29 leaves out."""
    return {
        "store": keeps,
        "error": None,
        "completed_at": None,
        "safety_identifier": asked.safety_identifier,
        "prompt_cache_key": asked.prompt_cache_key,
        "text": {"format": {"type": "text"}, **(asked.text or {})},
        "top_logprobs": 0,
    }
