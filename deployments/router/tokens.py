"""Serves `conserve.apis.TOKEN_PATHS` and `COUNT_INPUT`: an engine's answers that are no turns.

They are bounded as a turn's check is (`conserve.budget`), and a router asks for few at a time:
engines tokenize in one thread, which turns wait for, too.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from conserve import budget
from conserve.apis import COUNT_TOKENS, DETOKENIZE, RESPONSES, TOKENIZE
from conserve.errors import ApiError
from conserve.media import Lifted
from conserve.recognition.normal import without_billing_header
from conserve.served import as_served
from conserve.settings import Settings
from deployments import answers
from deployments.router.access import caller_of
from deployments.router.errors import answer_response, hold_back
from deployments.router.media import MediaReader, NotFetched
from deployments.router.reading import (
    changed_body,
    lifted_body,
    most_bytes,
    read_body,
    read_json,
    read_lifted,
    understood,
)
from deployments.router.request import read_request
from deployments.router.stored import StoredResponses
from deployments.router.upstream import EngineUnreachable, Upstream
from deployments.table_client import TableClient

logger = logging.getLogger("ray.serve")

# Each takes up to half a second of the thread in which an engine tokenizes turns' prompts, too.
_AT_A_TIME = 2
_MOST_WAITING = 64
_WAIT_S = 30.0
# Engines that are tried, one after another.
_ATTEMPTS = 3

# Makes of a tenant's salt and a body what the engine gets; raises ApiError where it is refused.
_Judged = Callable[..., bytes]
_T = TypeVar("_T")


@dataclass(eq=False)
class TokensEndpoint:
    """Has a body judged, then answered by an engine."""

    settings: Settings
    table: TableClient
    upstream: Upstream
    stored: StoredResponses
    media: MediaReader
    _free: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_AT_A_TIME))
    _waiting: int = 0

    async def serve(self, request: Request) -> Response:
        """Answer on one of `TOKEN_PATHS`."""
        return await _held_back(self._answered(request))

    async def count_input(self, request: Request) -> Response:
        """Count the tokens of the prompt that a turn of ``/v1/responses`` would have."""
        return await _held_back(self._counted(request))

    async def _counted(self, request: Request) -> Response:
        scope = {**request.scope, "path": RESPONSES}
        turn = await read_request(scope, request.receive, self.media, self.stored)
        async with self._one_of_few():
            checked = await self._ask(
                RESPONSES, lambda url: self.upstream.check(url, RESPONSES, turn.raw)
            )
        return answer_response(answers.InputTokens(sum(map(len, checked.prompts))))

    async def _answered(self, request: Request) -> Response:
        path = request.url.path
        judged, limit = _JUDGED[path]
        longest = most_bytes(self.settings)
        if limit is not None:
            longest = min(limit, self.settings.max_body_bytes)
        raw = await read_body(request.headers, request.receive, longest)
        caller = caller_of(request.scope)
        salt = None if caller is None else caller.cache_salt
        lifted = await lifted_body(raw, self.settings)
        arguments = (salt, self.media, lifted)
        try:
            asked = await understood(lifted, judged, *arguments)
        except NotFetched as missing:
            fetched = await self.media.fetch(missing, salt)
            asked = await understood(lifted, judged, *arguments, fetched)
        async with self._one_of_few():
            answer = await self._ask(path, lambda url: self.upstream.answered(url + path, asked))
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
        for engine in by_leisure(await self.table.engines())[:_ATTEMPTS]:
            try:
                return await ask(engine.url)
            except EngineUnreachable as error:
                logger.warning("%s at %s: %s", path, engine.id, error)
        raise ApiError(
            503, "no engine is ready to answer; try again shortly", "unavailable", retry_after_s=5
        )


async def _held_back(answer: Awaitable[Response]) -> Response:
    """Return an answer; a refusal that took long comes later."""
    arrived_s = time.perf_counter()
    try:
        return await answer
    except ApiError as error:
        await hold_back(error, arrived_s)
        raise


def _busy() -> ApiError:
    return ApiError(
        429,
        "too many requests for tokens wait already; try again shortly, or send fewer at a time",
        "overloaded",
        retry_after_s=5,
    )


def by_leisure(engines: Iterable[answers.Engine]) -> list[answers.Engine]:
    """Sort engines, as `/v1/engines` lists them, by how little it disturbs them.

    A prefiller that hosts no conversation streams no tokens, and one with an empty queue delays no
    first turn. An engine that leaves comes last. Encoders take other arguments, and are left out.
    """
    return sorted(
        (engine for engine in engines if engine.role != "encoder"),
        key=lambda engine: (
            engine.leaving,
            engine.hosts,
            engine.queued_tokens or 0,
            engine.conversations or 0,
        ),
    )


def _tokenize(
    salt: str | None, media: MediaReader, lifted: Lifted, fetched: Mapping[str, bytes] | None = None
) -> bytes:
    body = read_lifted(lifted, TOKENIZE, media.settings)
    budget.check_tokenize(body, len(lifted.raw))
    own = media.named(_of_the_model(body, media), TOKENIZE, lifted, salt, fetched)
    return lifted.put_back(changed_body(lifted.raw, body, own))


def _detokenize(salt: str | None, media: MediaReader, lifted: Lifted) -> bytes:
    raw, body = read_json(lifted.put_back(lifted.raw), DETOKENIZE)
    budget.check_detokenize(body)
    return changed_body(raw, body, _of_the_model(body, media))


def _of_the_model(body: dict[str, Any], media: MediaReader) -> dict[str, Any]:
    """Return a body that names the model itself; `ApiError` (404) if it asks for an unknown one.

    Keys' limits do not count, since its tokens are no secret.
    """
    if (asked := body.get("model")) is not None:
        media.names.find(asked, (), time.monotonic())
        body = {**body, "model": media.settings.model_id}
    return body


def _count_tokens(
    salt: str | None, media: MediaReader, lifted: Lifted, fetched: Mapping[str, bytes] | None = None
) -> bytes:
    settings = media.settings
    body = read_lifted(lifted, COUNT_TOKENS, settings)
    budget.check(body, COUNT_TOKENS)
    # vLLM's error, where there is no name, is one of the server's.
    own = as_served({**_of_the_model(body, media), "model": settings.model_id}, COUNT_TOKENS)
    if "billing_header" in settings.volatile_text:
        own = without_billing_header(COUNT_TOKENS, own)
    own = media.named(own, COUNT_TOKENS, lifted, salt, fetched)
    return lifted.put_back(changed_body(lifted.raw, body, own))


# How each path's body is read, and its most bytes; None: as many as a turn's, with its media.
_JUDGED: dict[str, tuple[_Judged, int | None]] = {
    TOKENIZE: (_tokenize, None),
    DETOKENIZE: (_detokenize, budget.MOST_DETOKENIZE_BYTES),
    COUNT_TOKENS: (_count_tokens, None),
}
