"""The HTTP server of an engine: vLLM's own app, with what ConServe changes and adds.

Routers send turns straight to it, so a token passes one process between the engine and the client.
"""

import asyncio
import os
import socket
from collections.abc import Callable

import ray
import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from pydantic import ValidationError
from starlette.responses import JSONResponse, Response
from vllm.entrypoints.serve import create_error_response

from conserve.apis import TOKEN_PATHS, TURN_PATHS
from conserve.complaints import complaint
from conserve.settings import Settings
from conserve.tokenizing import TokenCache
from deployments.engine.grammars import Grammars
from deployments.engine.tokenizing import keep_text, keep_tokens
from deployments.engine.turns import MEDIA_CONNECTOR, EngineTurns, skip_media_cache
from deployments.upstream import media_names, prepared_twice
from deployments.upstream.patch import require
from deployments.upstream.seams import require_seams

_DESCRIBED = (*TURN_PATHS, *TOKEN_PATHS)


class EngineHttp:
    """Serves one engine's turns by vLLM's HTTP app, which has not served anything yet."""

    def __init__(
        self, app: FastAPI, turns: EngineTurns, settings: Settings, image_name: Callable[[str], str]
    ) -> None:
        describe(app)
        explain_refusals(app)
        client, renderer = turns.client, app.state.online_renderer
        require(media_names.PATCH)
        media_names.keep_media_names(image_name)
        require(prepared_twice.PATCH)
        prepared_twice.prepare_once(client.renderer)
        require_seams("media_aside")
        os.environ["VLLM_MEDIA_CONNECTOR"] = MEDIA_CONNECTOR
        if not settings.special_tokens_in_text:
            keep_text(renderer)
        keyed = settings.keys_file is not None
        self.tokens: TokenCache | None = keep_tokens(renderer, salted_only=keyed)
        skip_media_cache(renderer)
        Grammars(client.vllm_config, renderer.renderer.tokenizer).bound(client)
        self._turns = turns
        self._host = settings.engine_host
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self.url = ""

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
        config = uvicorn.Config(
            self._turns,
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_keep_alive=3600,
            timeout_graceful_shutdown=5,
        )
        server = uvicorn.Server(config)
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
