"""The HTTP interface: what each path does, and how errors look."""

import dataclasses
import logging
import re
import time
from asyncio import gather
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any, Literal
from urllib.parse import quote, unquote

import msgspec
from starlette.applications import Starlette
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route, request_response
from starlette.types import Receive, Scope, Send

from conserve import apis
from conserve.encoders import Encoders
from conserve.errors import ApiError
from conserve.models import Names
from conserve.settings import Settings
from conserve.wire import TURN_SILENCE_S
from deployments import answers
from deployments.router.access import Access, models_of
from deployments.router.addons import RouterPart
from deployments.router.conversations import Conversations
from deployments.router.errors import (
    ENDING,
    TABLE_RESTARTING,
    answer_response,
    error_response,
    named,
)
from deployments.router.guard import Guard, with_headers
from deployments.router.media import MediaReader
from deployments.router.models import ByModel
from deployments.router.openapi import Description
from deployments.router.operators import Dashboard, Events, MetricsPaths, Probes
from deployments.router.stored import StoredResponses
from deployments.router.tokens import TokensEndpoint
from deployments.router.turn import TurnEndpoint
from deployments.router.upstream import Upstream
from deployments.table_client import TableClient, TableUnavailable
from deployments.tables import Tables

logger = logging.getLogger("ray.serve")

# Clients that send it expect Anthropic's shapes, on paths that are OpenAI's, too.
_ANTHROPIC_HEADER = "anthropic-version"


class _Name(PathConvertor):
    """A name that may hold slashes, and is not empty."""

    regex = ".+"


register_url_convertor("name", _Name())
# A 404 looks for a path behind a shorter prefix, which a proxy may have put before it.
_MOST_PARTS = 4


class FrontDoor:
    """The ASGI application of a router.

    Args:
        addons: add-ons' parts of this router.

    Attributes:
        turns: the endpoint of each model's turns, which hears of encoders and counting engines.
        probes: knows whether turns should be sent here; the router tells it what it hears.
        refusing: whether the application ends, and takes no new turns.

    Raises:
        KeyFileError: the settings name a key file that is not usable.
    """

    def __init__(
        self,
        settings: Settings,
        table: TableClient | Tables,
        router_id: str,
        addons: Iterable[RouterPart] = (),
    ) -> None:
        self.refusing = False
        self._access = Access(settings)
        self.probes = Probes(settings)
        self._settings = settings
        self._names = names = Names(settings, time.monotonic())
        self._table = table
        self._tables = (
            table.of if isinstance(table, Tables) else dict.fromkeys(settings.each, table)
        )
        self._started = int(time.time())
        # How long prompt plus output may be, of the models whose decoders have said so.
        self._max_model_len: dict[str, int] = {}
        upstream = Upstream(TURN_SILENCE_S)
        # Any model may go on from any response.
        stored = StoredResponses(settings, table, upstream)
        media = MediaReader(settings, names)
        self.turns: dict[str, TurnEndpoint] = {}
        tokens: dict[str, TokensEndpoint] = {}
        for model, own in settings.each.items():
            reader = dataclasses.replace(media, settings=own, encoders=Encoders())
            self.turns[model] = TurnEndpoint(
                own, self._tables[model], upstream, router_id, stored, reader, table.finish
            )
            tokens[model] = TokensEndpoint(own, self._tables[model], upstream, stored, reader)

        def by_model(path: str, serve: Callable[[str], Any]) -> Route:
            own = [serve(model) for model in names.models]
            apps = own if path in apis.TURN_PATHS else [*map(request_response, own)]
            several = ByModel(settings, names, dict(zip(names.models, apps, strict=True)))
            return Route(path, several if len(own) > 1 else own[0], methods=["POST"])

        get, post, delete = ["GET"], ["POST"], ["DELETE"]
        self._paths = Starlette(
            routes=[
                *(by_model(path, self.turns.__getitem__) for path in apis.TURN_PATHS),
                *(by_model(path, lambda one: tokens[one].serve) for path in apis.TOKEN_PATHS),
                by_model(apis.COUNT_INPUT, lambda one: tokens[one].count_input),
                Route("/v1/responses/{id}", stored.retrieve, methods=get),
                Route("/v1/responses/{id}", stored.delete, methods=delete),
                Route("/v1/responses/{id}/input_items", stored.input_items, methods=get),
                Route("/v1/responses/{id}/cancel", stored.cancel, methods=post),
                Route("/v1/models", self._models, methods=get),
                Route("/v1/models/{model:name}", self._model, methods=get),
                # First theirs: a conversation's id may hold slashes.
                *(route for part in addons for route in part.routes()),
                *Conversations(table).routes(),
                Route("/v1/engines", self._engines, methods=get),
                Route("/v1/engines/{id:name}/drain", self._drain, methods=post),
                Route("/v1/events", Events(table, lambda: self.probes.draining).serve, methods=get),
                *Dashboard().routes(),
                Route("/health", self._health, methods=get),
                *self.probes.routes(),
                *MetricsPaths(table).routes(),
                Route(
                    "/openapi.json", Description(names.models, table, upstream).serve, methods=get
                ),
            ],
            exception_handlers={
                ApiError: _api_error,
                HTTPException: _http_error,
                TableUnavailable: _unavailable,
                ClientDisconnect: _left,
                Exception: _bug,
            },
        )
        # It would lose a proxy's prefix.
        self._paths.router.redirect_slashes = False
        keyed = settings.keys_file is not None
        self._guarded = Guard(self._admitted, settings.host, settings.allowed_hosts, keyed)

    @property
    def draining(self) -> bool:
        """Return whether the router ends once another one has taken over, or nothing runs."""
        return self.probes.draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope = {**scope, "path": _normalised(scope)}
            send = with_headers(named(scope), send)
        await self._guarded(scope, receive, send)

    async def _admitted(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._access.admit(scope)
                if self.refusing and scope["path"] in apis.TURN_PATHS:
                    raise ENDING
            except ApiError as error:
                await error_response(error, scope["path"])(scope, receive, send)
                return
        await self._paths(scope, receive, send)

    async def _models(self, request: Request) -> Response:
        models = self._names.allowed(models_of(request.scope), time.monotonic())
        if _ANTHROPIC_HEADER in request.headers:
            cards = [await self._anthropic_card(model) for model in models]
            first, last = (models[0], models[-1]) if models else (None, None)
            return answer_response(answers.AnthropicModels(cards, False, first, last))
        return answer_response(answers.Models([await self._card(model) for model in models]))

    async def _model(self, request: Request) -> Response:
        asked = request.path_params["model"]
        model, adapter = self._names.find(asked, models_of(request.scope), time.monotonic())
        anthropic = _ANTHROPIC_HEADER in request.headers
        return answer_response(
            await (self._anthropic_card if anthropic else self._card)(
                adapter.name if adapter else model
            )
        )

    async def _card(self, model: str) -> answers.Model:
        return answers.Model(model, self._started, "conserve", await self._longest(model))

    async def _anthropic_card(self, model: str) -> answers.AnthropicModel:
        started = datetime.fromtimestamp(self._started, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        longest = await self._longest(model)
        return answers.AnthropicModel(model, model, started, longest, longest)

    async def _longest(self, name: str) -> int | None:
        """Return how many tokens prompt plus output may have, which engines say."""
        model, _ = self._names.find(name, (), time.monotonic())
        if model not in self._max_model_len:
            try:
                engines = await self._tables[model].engines(soon=True)
            except TableUnavailable:
                return None  # The model's name is known all the same.
            if longest := [engine.max_model_len for engine in engines if engine.hosts]:
                self._max_model_len[model] = min(longest)
        return self._max_model_len.get(model)

    async def _engines(self, request: Request) -> Response:
        return answer_response(answers.Engines(await self._table.engines(exact=True)))

    async def _drain(self, request: Request) -> Response:
        engine_id = request.path_params["id"]
        left = await self._table.drain(engine_id)
        if left is None:
            raise ApiError(
                404, "no engine has this id; GET /v1/engines has them", "engine_not_found"
            )
        return answer_response(answers.EngineDraining(engine_id, left))

    async def _health(self, request: Request) -> Response:
        each = self._settings.each
        found = await gather(*(self._tables[model].health() for model in each))
        alive = dict(zip(each, found, strict=True))
        models: dict[str, Literal["ok", "unavailable"]] = {
            model: "ok" if _serves(alive[model], own) else "unavailable"
            for model, own in each.items()
        }
        status: Literal["ok", "unavailable"] = (
            "ok" if "unavailable" not in models.values() else "unavailable"
        )
        health = answers.Health(
            status=status,
            models=models if len(models) > 1 else msgspec.UNSET,
            **_summed([msgspec.structs.asdict(one) for one in alive.values()]),
        )
        return answer_response(health, 200 if status == "ok" else 503)


def _serves(alive: answers.Alive, settings: Settings) -> bool:
    prefills = alive.prefillers > 0 or not settings.prefiller_replicas
    return prefills and alive.decoders > 0


def _summed(counts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the sums of counts, and of counts by name; what none has is left out."""
    total: dict[str, Any] = {}
    for name, value in (item for one in counts for item in one.items()):
        if isinstance(value, dict):
            total[name] = _summed([total.get(name) or {}, value])
        elif value is not msgspec.UNSET:
            total[name] = (total.get(name) or 0) + value
    return total


def _normalised(scope: Scope) -> str:
    """Return a request's path without empty parts; an escaped slash is one of a name, and stays."""
    raw = scope.get("raw_path") or quote(scope["path"]).encode()
    if b"//" not in raw and not raw.endswith(b"/"):
        return str(scope["path"])
    return unquote(re.sub(b"/+", b"/", raw).rstrip(b"/").decode()) or "/"


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error, request.url.path)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, headers = request.scope["path"], dict(error.headers or {})
    if error.status_code == 404:
        message = f"no such path: {path[:100]}"
        if (meant := _meant(request)) is not None:
            message += (
                f"; use {meant[:100]}. Correct the base URL, or have the proxy strip its prefix"
            )
            path = meant
    else:
        # Starlette names those of one route, and a path may have several.
        headers["Allow"] = ", ".join(sorted(_methods(request, path)))
        message = f"{request.method} is not possible on {path[:100]}; it has {headers['Allow']}"
    response = error_response(ApiError(error.status_code, message), path)
    response.headers.update(headers)
    return response


def _meant(request: Request) -> str | None:
    """Return the path that is probably meant: behind a prefix, or with /v1 before it."""
    path = request.scope["path"]
    parts = path.split("/", _MOST_PARTS)
    for skipped in range(1, len(parts)):
        behind = "/" + "/".join(parts[skipped:])
        for meant in (behind, "/v1" + behind):
            if meant != path and _methods(request, meant):
                return meant
    return None


def _methods(request: Request, path: str) -> set[str]:
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    scope = {**request.scope, "path": path}
    on_it = (route for route in routes if route.matches(scope)[0] != Match.NONE)
    return {method for route in on_it for method in route.methods or ()}


async def _unavailable(request: Request, error: Exception) -> Response:
    return error_response(TABLE_RESTARTING, request.url.path)


async def _left(request: Request, error: Exception) -> Response:
    """Answer a client that left while it sent its request; it does not read this."""
    return Response(status_code=400)


async def _bug(request: Request, error: Exception) -> Response:
    logger.error("unexpected error on %s", request.url.path, exc_info=error)
    internal = ApiError(500, "internal error; see the router's log", "internal_error")
    return error_response(internal, request.url.path)
