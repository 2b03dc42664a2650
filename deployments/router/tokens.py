"""The endpoints `/tokenize` and `/detokenize`: an engine's own answer, and no turn.

What they take of an engine is bounded as a turn's check is (`conserve.budget`), and a router asks
for little at a time: engines make tokens in one thread, which turns wait for too.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from conserve import budget
from conserve.errors import ApiError
from conserve.numbers import beyond_64_bits
from conserve.settings import Settings
from conserve.tenants import Caller
from deployments.router.access import caller_of
from deployments.router.request import named_model, read_body, read_json, understood
from deployments.router.salt import own_media
from deployments.router.upstream import EngineUnreachable, Upstream
from deployments.table.table_client import TableClient

logger = logging.getLogger("ray.serve")

# Half a second each at most, of the thread in which an engine makes tokens of turns' prompts too.
_AT_A_TIME = 2
_MOST_WAITING = 64
_WAIT_S = 30.0
# Engines that are tried, one after another.
_ATTEMPTS = 3

_Judged = Callable[[Settings, bytes], bytes]
"""A body as the engine gets it; raises ApiError where it is refused."""


class TokensEndpoint:
    """Has a body judged, then answered by an engine.

    Args:
        table: knows the engines.
    """

    def __init__(self, settings: Settings, table: TableClient, upstream: Upstream) -> None:
        self._settings = settings
        self._table = table
        self._upstream = upstream
        self._free = asyncio.Semaphore(_AT_A_TIME)
        self._waiting = 0

    async def tokenize(self, request: Request) -> Response:
        """Tokens of a text, or of messages as the model's chat template writes them.

        Raises:
            ApiError: it is not to be had.
        """
        limit = budget.MOST_TOKENIZE_BYTES
        return await self._serve(request, limit, partial(_tokenize, caller_of(request.scope)))

    async def detokenize(self, request: Request) -> Response:
        """Text of tokens.

        Raises:
            ApiError: it is not to be had.
        """
        return await self._serve(request, budget.MOST_DETOKENIZE_BYTES, _detokenize)

    async def _serve(self, request: Request, limit: int, judged: _Judged) -> Response:
        limit = min(limit, self._settings.max_body_bytes)
        raw = await read_body(request.headers, request.receive, limit)
        if raw is None:
            raise ClientDisconnect
        asked = await understood(raw, partial(judged, self._settings))
        async with self._one_of_few():
            answer = await self._ask(request.url.path, asked)
        return Response(answer, media_type="application/json")

    @asynccontextmanager
    async def _one_of_few(self) -> AsyncIterator[None]:
        if self._waiting >= _MOST_WAITING:
            raise _busy()
        self._waiting += 1
        try:
            async with asyncio.timeout(_WAIT_S):
                await self._free.acquire()
        except TimeoutError:
            raise _busy() from None
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._free.release()

    async def _ask(self, path: str, raw: bytes) -> bytes:
        for engine in by_leisure(await self._table.call("engines"))[:_ATTEMPTS]:
            try:
                return await self._upstream.answered(engine["url"] + path, raw)
            except EngineUnreachable as error:
                logger.warning("%s at %s: %s", path, engine["id"], error)
        raise ApiError(
            503, "no engine is ready to answer; try again shortly", "unavailable", retry_after_s=5
        )


def _busy() -> ApiError:
    return ApiError(
        429,
        "too many ask for tokens at a time; try again shortly, or ask for fewer at once",
        "overloaded",
        retry_after_s=5,
    )


def by_leisure(engines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Engines as `/v1/engines` lists them, those first that it disturbs least.

    A prefiller's tokens are awaited by nobody, and one that has nothing queued is asked by no first
    turn. An engine that leaves is asked where there is no other.
    """
    return sorted(
        engines,
        key=lambda engine: (
            engine["leaving"],
            engine["role"] != "prefiller",
            engine["queued_tokens"] or 0,
            engine["conversations"] or 0,
        ),
    )


def _tokenize(caller: Caller | None, settings: Settings, raw: bytes) -> bytes:
    body = _read(settings, raw, chat=True)
    budget.check_tokenize(body, len(raw))
    if caller is not None and "messages" in body:
        messages = own_media(body["messages"], caller.cache_salt)
        if messages is not body["messages"]:
            return json.dumps({**body, "messages": messages}).encode()
    return raw


def _detokenize(settings: Settings, raw: bytes) -> bytes:
    budget.check_detokenize(_read(settings, raw, chat=False))
    return raw


def _read(settings: Settings, raw: bytes, chat: bool) -> dict[str, Any]:
    body = read_json(raw, chat)
    named_model(body, settings)
    large = beyond_64_bits(body)
    if large is not None:
        raise ApiError(
            400, f"{large} has a number that takes more than 64 bits; send a smaller", param=large
        )
    return body
