"""Keeps the data of long media out of the way of an engine's HTTP server.

vLLM parses, checks and copies a body on the event loop that passes other turns' tokens on: one with
40 MB of base64 for half a second. So a thread sets the base64 aside before, and vLLM gets it where
it decodes the image, which it does in threads of its own.

vLLM loads the media connector that ``VLLM_MEDIA_CONNECTOR`` names.
"""

import asyncio
import os
from typing import Any

import pybase64
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector
from vllm.multimodal.media.image import ImageMediaIO

from conserve import wire
from conserve.media import lifted_media
from deployments.engine.response_store import MEDIA, read_ahead, replay
from deployments.upstream.seams import require_seams

_CONNECTOR = "conserve"
# Shorter bodies take vLLM a few milliseconds.
_LONG_BYTES = 256 * 1024
# Base64 by its mark, for requests that are served now.
_aside: dict[str, bytes] = {}


class MediaAside:
    """ASGI middleware that sets media in long bodies aside while a request is served."""

    def __init__(self, app: ASGIApp) -> None:
        require_seams("media_aside")
        self._app = app
        os.environ["VLLM_MEDIA_CONNECTOR"] = _CONNECTOR

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers({})
        if int(headers.get("content-length", 0)) <= _LONG_BYTES:
            await self._app(scope, receive, send)
            return
        body = await read_ahead(receive)
        told = headers.get(wire.TURN_HEADER)
        noted = 0 if told is None else wire.DecoderTurn.read(told).sent_bytes
        path = scope["path"].removeprefix(wire.CHECK_PREFIX).removeprefix(wire.PREFILL_PREFIX)
        lifted = await asyncio.to_thread(lambda: lifted_media(body[noted:], path))
        _aside.update(lifted.spans)
        try:
            receive = replay(body[:noted] + lifted.raw, receive)
            # The turn may last, and its media are in memory already.
            body = b""
            await self._app({**scope, MEDIA: lifted.spans}, receive, send)
        finally:
            for mark in lifted.spans:
                del _aside[mark]


@MEDIA_CONNECTOR_REGISTRY.register(_CONNECTOR)
class AsideConnector(MediaConnector):  # type: ignore[misc]  # vLLM's types are not looked at.
    """Reads the data that were set aside."""

    def _load_data_url(self, url: str, media_io: Any) -> Any:
        head, _, mark = url.partition(",")
        data = _aside.get(mark)
        if data is None:
            return super()._load_data_url(url, media_io)
        if isinstance(media_io, ImageMediaIO):
            # Without a copy as text.
            return media_io.load_bytes(pybase64.b64decode(data, validate=True))
        return super()._load_data_url(f"{head},{data.decode()}", media_io)
