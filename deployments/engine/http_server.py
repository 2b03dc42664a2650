"""The HTTP server of an engine: vLLM's own app, with what ConServe changes and adds.

Routers send turns straight to it, so a token passes one process between the engine and the client.
"""

import asyncio
import os
import socket
from collections.abc import Callable
from typing import Any

import pybase64
import ray
import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.entrypoints.serve import create_error_response
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector
from vllm.multimodal.media.image import ImageMediaIO

from conserve import wire
from conserve.apis import TOKEN_PATHS, TURN_PATHS
from conserve.complaints import complaint
from conserve.direct import Desk
from conserve.holdings import Holdings
from conserve.media import lifted_media
from conserve.settings import Settings
from conserve.tokenizing import TokenCache
from deployments.engine.asgi import MEDIA, read_ahead, replay
from deployments.engine.check import RequestCheck, make_checkable
from deployments.engine.grammars import Grammars
from deployments.engine.observer import TurnObserver
from deployments.engine.response_store import ResponseKeeper
from deployments.engine.tokenizing import keep_text, keep_tokens
from deployments.engine.vision.node_images import MissingTokens
from deployments.upstream import media_names, prepared_twice
from deployments.upstream.patch import require
from deployments.upstream.seams import require_seams

_DESCRIBED = (*TURN_PATHS, *TOKEN_PATHS)


class EngineHttp:
    """Serves one engine's turns by vLLM's HTTP app, which has not served anything yet."""

    def __init__(
        self,
        app: FastAPI,
        client: Any,
        tasks: tuple[str, ...],
        settings: Settings,
        *,
        holdings: Holdings,
        desk: Desk,
        has_more: Callable[[], None],
        waiting_tokens: Callable[[], int],
        missing_tokens: MissingTokens,
        image_name: Callable[[str], str],
    ) -> None:
        describe(app)
        explain_refusals(app)
        require(media_names.PATCH)
        media_names.keep_media_names(image_name)
        require(prepared_twice.PATCH)
        prepared_twice.prepare_once(client.renderer)
        renderer = app.state.online_renderer
        if not settings.special_tokens_in_text:
            keep_text(renderer)
        keyed = settings.keys_file is not None
        self.tokens: TokenCache | None = keep_tokens(renderer, salted_only=keyed)
        stores = client.vllm_config.kv_transfer_config is not None
        make_checkable(client, renderer, tasks, missing_tokens, stores=stores)
        Grammars(client.vllm_config, renderer.renderer.tokenizer).bound(client)
        keeper = ResponseKeeper(app, media_bytes=settings.media.bytes)
        self._observer = TurnObserver(keeper, holdings, desk, has_more, waiting_tokens)
        self._host = settings.engine_host
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self.url = ""

    @property
    def engine_ends(self) -> bool:
        """Return whether the engine has been told to end, as a turn has found out."""
        return self._observer.ending

    @property
    def has_ended(self) -> bool:
        return self._serving is not None and self._serving.done()

    @property
    def is_busy(self) -> bool:
        """Return whether any request is not answered to its end."""
        return self._server is not None and bool(self._server.server_state.tasks)

    async def listen(self) -> None:
        host = ray.util.get_node_ip_address() if self._host == "node" else self._host
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.bind((host, 0))
        server = uvicorn.Server(
            uvicorn.Config(
                MediaAside(RequestCheck(self._observer)),
                log_level="warning",
                access_log=False,
                lifespan="off",
                timeout_keep_alive=3600,
                timeout_graceful_shutdown=5,
            )
        )
        task = asyncio.get_running_loop().create_task(server.serve(sockets=[listener]))
        while not server.started:
            if task.done():
                task.result()
                raise RuntimeError(f"the engine's HTTP server did not start on {host}")
            await asyncio.sleep(0.01)
        self._server, self._serving = server, task
        self.url = f"http://{host}:{listener.getsockname()[1]}"


def describe(app: FastAPI) -> None:
    """Make the document at `/openapi.json`, for which routers ask, before the first turn.

    At its first request FastAPI would, of all of vLLM's paths, and block all streams for 3 s.
    """
    routes = [route for route in app.routes if getattr(route, "path", None) in _DESCRIBED]
    app.openapi_schema = get_openapi(title=app.title, version=app.version, routes=routes)


def explain_refusals(app: FastAPI) -> None:
    """Have vLLM's HTTP app, which serves nothing yet, say what is wrong with a body."""
    app.exception_handler(RequestValidationError)(_invalid)
    app.exception_handler(ValidationError)(_invalid)
    # vLLM has built it without these handlers; it is built anew when it is needed.
    app.middleware_stack = None


async def _invalid(request: Request, error: Exception) -> Response:
    if isinstance(error, RequestValidationError):
        errors, body = error.errors(), error.body
    else:
        # Parts of messages are judged only when the template reads them.
        assert isinstance(error, ValidationError)
        errors, body = error.errors(), await request.json()
    if isinstance(errors[0], str):
        # The body has another content type, as vLLM says.
        field, message = "", errors[0]
    else:
        field, message = complaint(errors, body)
    if field and not message.startswith(field):
        message = f"{field}: {message}"
    refusal = create_error_response(message, param=field or None)
    return JSONResponse(refusal.model_dump(), refusal.error.code)


_CONNECTOR = "conserve"
# Shorter bodies take vLLM a few milliseconds.
_LONG_BYTES = 256 * 1024
# Base64 by its mark, for requests that are served now.
_aside: dict[str, bytes] = {}


class MediaAside:
    """ASGI middleware that sets media in long bodies aside while a request is served.

    On the event loop, vLLM would take half a second for 40 MB of base64. It gets the data where it
    decodes the image, in threads of its own, by the connector that ``VLLM_MEDIA_CONNECTOR`` names.
    """

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
