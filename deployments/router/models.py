"""Gives each request that names a model to that model's part of the router."""

import json
import time
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from conserve.models import Names
from conserve.settings import Settings
from deployments.router.access import models_of
from deployments.router.reading import aside, most_bytes, read_body


class ByModel:
    """ASGI application of a path that several models serve.

    It reads the body for the model's name alone, and the model's own endpoint reads it again. So
    an application of a single model pays nothing for it.
    """

    def __init__(self, settings: Settings, names: Names, endpoints: Mapping[str, ASGIApp]) -> None:
        self._settings = settings
        self._names = names
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request; raises `ApiError` (404) if its caller may use no model of that name."""
        raw = await read_body(Headers(scope=scope), receive, most_bytes(self._settings))
        asked = await aside(_model, raw)
        if isinstance(asked, str | None):
            name, _ = self._names.find(asked, models_of(scope), time.monotonic())
        else:
            # Each model's endpoint refuses it in the words of its API.
            name = self._names.models[0]
        # It was decompressed.
        headers = [one for one in scope["headers"] if one[0] != b"content-encoding"]
        body: list[Message] = [{"type": "http.request", "body": raw, "more_body": False}]

        async def again() -> Message:
            return body.pop() if body else await receive()

        await self._endpoints[name]({**scope, "headers": headers}, again, send)


class _Named(msgspec.Struct):
    model: Any = None


_NAMED = msgspec.json.Decoder(_Named)


def _model(raw: bytes) -> Any:
    """Return what a body says of its model; something else than a text, if it says nothing."""
    try:
        # Without making anything of all else in it.
        return _NAMED.decode(raw).model
    except (msgspec.DecodeError, UnicodeDecodeError):
        # JSON of a looser kind, or none.
        pass
    try:
        return json.loads(raw).get("model")
    except (ValueError, AttributeError, RecursionError):
        return False
