"""The endpoints of `conserve.apis.TOKEN_PATHS`, and `COUNT_INPUT`: an engine's answer, and no turn.

What they take of an engine is bounded as a turn's check is (`conserve.budget`), and a router asks
for little at a time: engines make tokens in one thread, which turns wait for too.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from conserve import budget
from conserve.apis import COUNT_TOKENS, DETOKENIZE, RESPONSES, TOKENIZE
from conserve.errors import ApiError
from conserve.recognition.volatile import without_billing_header
from conserve.served import as_served
from conserve.settings import Settings
from conserve.tenants import Caller
from deployments import answers
from deployments.router.access import caller_of
from deployments.router.patience import hold_back
from deployments.router.reading import understood, whole_characters
from deployments.router.request import (
    changed_body,
    checked_body,
    read_body,
    read_json,
    read_request,
)
from deployments.router.responses import answer_response
from deployments.router.salt import own_media
from deployments.router.stored import StoredResponses
from deployments.router.upstream import EngineUnreachable, Upstream
from deployments.table.table_client import TableClient

logger = logging.getLogger("ray.serve")

# Half a second each at most, of the thread in which an engine makes tokens of turns' prompts too.
_AT_A_TIME = 2
_MOST_WAITING = 64
_WAIT_S = 30.0
# Engines that are tried, one after another.
_ATTEMPTS = 3

_Judged = Callable[[Caller | None, Settings, bytes], bytes]
"""A body as the engine gets it; raises ApiError where it is refused."""
_T = TypeVar("_T")


class TokensEndpoint:
    """Has a body judged, then answered by an engine.

    Args:
        table: knows the engines.
        stored: finds the history of an input that names a response.
    """

    def __init__(
        self,
        settings: Settings,
        table: TableClient,
        upstream: Upstream,
        stored: StoredResponses,
    ) -> None:
        self._settings = settings
        self._table = table
        self._upstream = upstream
        self._stored = stored
        self._free = asyncio.Semaphore(_AT_A_TIME)
        self._waiting = 0

    async def serve(self, request: Request) -> Response:
        """The endpoint of each of the paths.

        Raises:
            ApiError: what is asked for is not to be had.
        """
        return await _held_back(self._answered(request))

    async def count_input(self, request: Request) -> Response:
        """``POST /v1/responses/input_tokens``: the tokens of the prompt that a turn would have.

        Raises:
            ApiError: the turn would be refused.
        """
        return await _held_back(self._counted(request))

    async def _counted(self, request: Request) -> Response:
        scope = {**request.scope, "path": RESPONSES}
        turn = await read_request(scope, request.receive, self._settings, self._stored)
        if turn is None:
            raise ClientDisconnect
        async with self._one_of_few():
            checked = await self._ask(
                RESPONSES, lambda url: self._upstream.check(url, RESPONSES, turn.raw)
            )
        tokens = sum(map(len, checked.prompts))
        return answer_response(answers.InputTokens(tokens))

    async def _answered(self, request: Request) -> Response:
        path = request.url.path
        judged, most_bytes = _JUDGED[path]
        longest = self._settings.max_body_bytes
        limit = longest if most_bytes is None else min(most_bytes, longest)
        raw = await read_body(request.headers, request.receive, limit)
        if raw is None:
            raise ClientDisconnect
        caller = caller_of(request.scope)
        asked = await understood(len(raw), _judge, judged, caller, self._settings, raw)
        async with self._one_of_few():
            answer = await self._ask(path, lambda url: self._upstream.answered(url + path, asked))
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

    async def _ask(self, path: str, ask: Callable[[str], Awaitable[_T]]) -> _T:
        for engine in by_leisure(await self._table.engines())[:_ATTEMPTS]:
            try:
                return await ask(engine.url)
            except EngineUnreachable as error:
                logger.warning("%s at %s: %s", path, engine.id, error)
        raise ApiError(
            503, "no engine is ready to answer; try again shortly", "unavailable", retry_after_s=5
        )


async def _held_back(answer: Awaitable[Response]) -> Response:
    """An answer; a refusal that took long comes later."""
    arrived_s = time.perf_counter()
    try:
        return await answer
    except ApiError as error:
        await hold_back(error, arrived_s)
        raise


def _busy() -> ApiError:
    return ApiError(
        429,
        "too many ask for tokens at a time; try again shortly, or ask for fewer at once",
        "overloaded",
        retry_after_s=5,
    )


def by_leisure(engines: Iterable[answers.Engine]) -> list[answers.Engine]:
    """Engines as `/v1/engines` lists them, those first that it disturbs least.

    The tokens of a prefiller that hosts no conversation are awaited by nobody, and one that has
    nothing queued is asked by no first turn. An engine that leaves is asked where there is no
    other.
    """
    return sorted(
        engines,
        key=lambda engine: (
            engine.leaving,
            engine.hosts,
            engine.queued_tokens or 0,
            engine.conversations or 0,
        ),
    )


def _judge(judged: _Judged, caller: Caller | None, settings: Settings, raw: bytes) -> bytes:
    return judged(caller, settings, whole_characters(raw))


def _tokenize(caller: Caller | None, settings: Settings, raw: bytes) -> bytes:
    body = read_json(raw, TOKENIZE, settings)
    budget.check_tokenize(body, len(raw))
    return changed_body(raw, body, _with_own_media(body, caller))


def _detokenize(caller: Caller | None, settings: Settings, raw: bytes) -> bytes:
    budget.check_detokenize(read_json(raw, DETOKENIZE, settings))
    return raw


def _count_tokens(caller: Caller | None, settings: Settings, raw: bytes) -> bytes:
    body = checked_body(raw, COUNT_TOKENS, settings)
    # vLLM's error, where there is no name, is one of the server's.
    named = {**body, "model": settings.model_id}
    own = _with_own_media(as_served(named, COUNT_TOKENS), caller)
    if "billing_header" in settings.volatile_text:
        own = without_billing_header(COUNT_TOKENS, own)
    return changed_body(raw, body, own)


def _with_own_media(body: dict[str, Any], caller: Caller | None) -> dict[str, Any]:
    if caller is None or "messages" not in body:
        return body
    return {**body, "messages": own_media(body["messages"], caller.cache_salt)}


# How each path's body is read, and how long it may be in bytes, if not as any other.
_JUDGED: dict[str, tuple[_Judged, int | None]] = {
    TOKENIZE: (_tokenize, budget.MOST_TOKENIZE_BYTES),
    DETOKENIZE: (_detokenize, budget.MOST_DETOKENIZE_BYTES),
    COUNT_TOKENS: (_count_tokens, None),
}
