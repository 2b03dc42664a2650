"""The HTTP interface: which path does what, and how errors look."""

import logging
import time
from datetime import UTC, datetime
from typing import Any

from starlette.applications import Starlette
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from conserve import apis, identity
from conserve.direct import Homes
from conserve.errors import ApiError, unknown_model
from conserve.settings import Settings
from conserve.wire import TURN_SILENCE_S
from deployments.environments.client import EnvironmentClient
from deployments.messages import Refusal
from deployments.router.access import Access, caller_of
from deployments.router.endpoint import TurnEndpoint
from deployments.router.environments import Environments
from deployments.router.events import Events
from deployments.router.guard import Guard
from deployments.router.openapi import Description
from deployments.router.reading import read_short
from deployments.router.responses import TABLE_RESTARTING, error_response
from deployments.router.stored import StoredResponses
from deployments.router.tokens import TokensEndpoint
from deployments.router.tool_reports import read_report
from deployments.router.upstream import Upstream
from deployments.table.table_client import TableClient, TableUnavailable

logger = logging.getLogger("ray.serve")

_LISTED_AT_MOST = 10_000
# Whoever sends it expects Anthropic's shapes, on paths that are OpenAI's too.
_ANTHROPIC_HEADER = "anthropic-version"
_SHORT_BYTES = 64 * 1024


class _Name(PathConvertor):
    """A name that may hold slashes, and holds something: `/v1/models/` is `/v1/models`."""

    regex = ".+"


register_url_convertor("name", _Name())


class FrontDoor:
    """The ASGI application of a router.

    Args:
        environments: the manager of tool environments; None: there are none.
        homes: its memory of where histories live; None: one that is empty.

    Raises:
        KeyFileError: the settings name a key file that is not usable.
    """

    def __init__(
        self,
        settings: Settings,
        table: TableClient,
        router_id: str,
        environments: EnvironmentClient | None = None,
        homes: Homes | None = None,
    ) -> None:
        self._access = Access(settings)
        self._settings = settings
        self._table = table
        self._started = int(time.time())
        # How long prompt plus output may be; None until a decoder has been there.
        self._max_model_len: int | None = None
        upstream = Upstream(TURN_SILENCE_S)
        turns = TurnEndpoint(settings, table, upstream, router_id, homes)
        stored = StoredResponses(settings, table, upstream)
        tokens = TokensEndpoint(settings, table, upstream, stored)
        get, post, delete = ["GET"], ["POST"], ["DELETE"]
        self._paths = Starlette(
            routes=[
                *(Route(path, turns, methods=post) for path in apis.TURN_PATHS),
                *(Route(path, tokens.serve, methods=post) for path in apis.TOKEN_PATHS),
                Route(apis.COUNT_INPUT, tokens.count_input, methods=post),
                Route("/v1/responses/{id}", stored.retrieve, methods=get),
                Route("/v1/responses/{id}", stored.delete, methods=delete),
                Route("/v1/responses/{id}/cancel", stored.cancel, methods=post),
                Route("/v1/models", self._models, methods=get),
                Route("/v1/models/{model:name}", self._model, methods=get),
                Route("/v1/conversations", self._conversations, methods=get),
                Route("/v1/conversations/{id:path}/tools", self._report_tool, methods=post),
                *Environments(environments, _tenant).routes(),
                Route("/v1/conversations/{id:name}", self._conversation, methods=get),
                Route("/v1/conversations/{id:name}", self._release, methods=delete),
                Route("/v1/engines", self._engines, methods=get),
                Route("/v1/events", Events(table).serve, methods=get),
                Route("/programs/release", self._release_program, methods=post),
                Route("/health", self._health, methods=get),
                Route("/metrics", self._metrics, methods=get),
                Route("/openapi.json", Description(settings, table, upstream).serve, methods=get),
            ],
            exception_handlers={
                ApiError: _api_error,
                HTTPException: _http_error,
                TableUnavailable: _unavailable,
                ClientDisconnect: _left,
                Exception: _bug,
            },
        )
        keyed = settings.keys_file is not None
        self._guarded = Guard(self._admitted, settings.host, settings.allowed_hosts, keyed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._guarded(scope, receive, send)

    async def _admitted(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._access.admit(scope)
            except ApiError as error:
                await error_response(error, scope["path"])(scope, receive, send)
                return
        await self._paths(scope, receive, send)

    async def _models(self, request: Request) -> Response:
        if _ANTHROPIC_HEADER in request.headers:
            model = self._settings.model_id
            ends = {"has_more": False, "first_id": model, "last_id": model}
            return JSONResponse({"data": [await self._anthropic_card()], **ends})
        return JSONResponse({"object": "list", "data": [await self._card()]})

    async def _model(self, request: Request) -> Response:
        model = request.path_params["model"]
        if model != self._settings.model_id:
            raise unknown_model(model, self._settings.model_id)
        anthropic = _ANTHROPIC_HEADER in request.headers
        return JSONResponse(await (self._anthropic_card() if anthropic else self._card()))

    async def _card(self) -> dict[str, Any]:
        return {
            "id": self._settings.model_id,
            "object": "model",
            "created": self._started,
            "owned_by": "conserve",
            "max_model_len": await self._longest(),
        }

    async def _anthropic_card(self) -> dict[str, Any]:
        model = self._settings.model_id
        started = datetime.fromtimestamp(self._started, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        longest = await self._longest()
        limits = {"max_input_tokens": longest, "max_tokens": longest}
        card = {"type": "model", "id": model, "display_name": model, "created_at": started}
        return {**card, **limits}

    async def _longest(self) -> int | None:
        """How many tokens prompt plus output may have, which is the engines' to say."""
        if self._max_model_len is None:
            try:
                engines = await self._table.engines(soon=True)
            except TableUnavailable:
                return None  # Which model is served is known all the same.
            longest = [engine["max_model_len"] for engine in engines if engine["hosts"]]
            self._max_model_len = min(longest, default=None)
        return self._max_model_len

    async def _conversations(self, request: Request) -> Response:
        text = request.query_params.get("limit", "1000")
        # Only ASCII's digits, and few: `isdigit` holds of "²" too, and `int` refuses thousands.
        plain = text.isascii() and text.isdigit() and len(text) <= len(str(_LISTED_AT_MOST))
        if not plain or not 1 <= int(text) <= _LISTED_AT_MOST:
            raise ApiError(
                400, f"limit must be a number from 1 to {_LISTED_AT_MOST}", param="limit"
            )
        caller = caller_of(request.scope)
        # An admin's list is of all tenants, unless it asks for one's.
        everybody = caller is not None and caller.admin and "tenant" not in request.query_params
        tenant = None if everybody else _tenant(request)
        listed = await self._table.conversations(int(text), tenant)
        return Response(listed, media_type="application/json")

    async def _conversation(self, request: Request) -> Response:
        id_ = identity.scoped(_tenant(request), request.path_params["id"])
        found = await self._table.conversation(id_)
        if found is None:
            raise _unknown_conversation()
        return JSONResponse(found)

    async def _release(self, request: Request) -> Response:
        conversation_id = request.path_params["id"]
        if not await self._table.release(identity.scoped(_tenant(request), conversation_id)):
            raise _unknown_conversation()
        return JSONResponse(
            {"id": conversation_id, "object": "conversation.deleted", "deleted": True}
        )

    async def _report_tool(self, request: Request) -> Response:
        id_ = identity.scoped(_tenant(request), request.path_params["id"])
        report = read_report(await _short_object(request))
        running = await self._table.report_tool(id_, report)
        if isinstance(running, Refusal):
            raise ApiError(running.status, running.message, running.code)
        if running is None:
            raise _unknown_conversation()
        return JSONResponse({"running_tools": running})

    async def _release_program(self, request: Request) -> Response:
        body = await _short_object(request)
        program_id = body.get("program_id")
        if not isinstance(program_id, str) or not program_id:
            raise ApiError(400, "program_id must be a non-empty string", param="program_id")
        try:
            identity.explicit_id({}, {"program_id": program_id})
        except identity.InvalidConversationId as error:
            raise ApiError(400, str(error), param="program_id") from None
        id_ = identity.scoped(_tenant(request), program_id.strip())
        released = await self._table.release(id_)
        return JSONResponse({"program_id": program_id, "released": released})

    async def _engines(self, request: Request) -> Response:
        engines = await self._table.engines(exact=True)
        return JSONResponse({"object": "list", "data": engines})

    async def _health(self, request: Request) -> Response:
        alive = await self._table.health()
        prefills = alive["prefillers"] > 0 or not self._settings.prefiller_replicas
        healthy = prefills and alive["decoders"] > 0
        return JSONResponse(
            {"status": "ok" if healthy else "unavailable", **alive},
            status_code=200 if healthy else 503,
        )

    async def _metrics(self, request: Request) -> Response:
        return Response(
            await self._table.metrics(),
            media_type="text/plain; version=0.0.4; charset=utf-8",
        )


def _tenant(request: Request) -> str | None:
    """Return whose conversations a request is about; None where there are no keys.

    Raises:
        ApiError: another tenant's, and the key is no admin's.
    """
    caller, asked = caller_of(request.scope), request.query_params.get("tenant")
    if caller is None:
        if asked is not None:
            raise ApiError(400, "tenant: there are no tenants without keys", param="tenant")
        return None
    if asked in (None, caller.tenant):
        return caller.tenant
    if not caller.admin:
        raise ApiError(
            403,
            "only an admin key may ask for another tenant",
            "admin_key_required",
            param="tenant",
        )
    return asked


async def _short_object(request: Request) -> dict[str, Any]:
    body = await read_short(request, _SHORT_BYTES)
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    return body


def _unknown_conversation() -> ApiError:
    return ApiError(
        404,
        "no live conversation has this id; it was never seen, or has ended",
        "conversation_not_found",
    )


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error, request.url.path)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, headers = request.url.path, dict(error.headers or {})
    if error.status_code == 404:
        message = f"no such path: {path[:100]}"
    elif error.status_code == 405:
        # Starlette names those of one route, and a path may have several.
        headers["Allow"] = ", ".join(sorted(_methods(request)))
        message = f"{request.method} is not possible on {path[:100]}; it has {headers['Allow']}"
    else:
        message = f"{request.method} is not possible here"
    response = error_response(ApiError(error.status_code, message), path)
    response.headers.update(headers)
    return response


def _methods(request: Request) -> set[str]:
    """The methods that a path has."""
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    on_it = (route for route in routes if route.matches(request.scope)[0] != Match.NONE)
    return {method for route in on_it for method in route.methods or ()}


async def _unavailable(request: Request, error: Exception) -> Response:
    return error_response(TABLE_RESTARTING, request.url.path)


async def _left(request: Request, error: Exception) -> Response:
    """For a client that left while it sent its request; nobody reads this."""
    return Response(status_code=400)


async def _bug(request: Request, error: Exception) -> Response:
    logger.error("unexpected error on %s", request.url.path, exc_info=error)
    internal = ApiError(500, "internal error; see the router's log", "internal_error")
    return error_response(internal, request.url.path)
