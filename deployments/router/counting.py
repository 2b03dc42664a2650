"""``POST /v1/messages/count_tokens``: what a turn's prompt would have in tokens, by any engine."""

import random

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response

from conserve.apis import COUNT_TOKENS
from conserve.errors import ApiError
from conserve.recognition.volatile import without_billing_header
from conserve.settings import Settings
from deployments.router.reading import understood
from deployments.router.request import changed_body, checked_body, read_body
from deployments.router.upstream import EngineUnreachable, Upstream
from deployments.table.table_client import TableClient


class TokenCount:
    """Has the prompts of turns counted that may never come: nothing is placed, or bound.

    Args:
        table: knows the engines.
    """

    def __init__(self, settings: Settings, table: TableClient, upstream: Upstream) -> None:
        self._settings = settings
        self._table = table
        self._upstream = upstream

    async def serve(self, request: Request) -> Response:
        """The endpoint.

        Raises:
            ApiError: the request is wrong, or no engine can be asked.
        """
        raw = await read_body(Headers(scope=request.scope), request.receive, self._settings)
        if raw is None:
            return Response(status_code=400)  # The client has left; nobody reads this.
        raw = await understood(len(raw), self._own, raw)
        engines = await self._table.call("engines")
        # Those that prefill have no stream to hold up.
        random.shuffle(engines)
        for engine in sorted(engines, key=lambda engine: engine["role"] != "prefiller"):
            try:
                counted = await self._upstream.ask(engine["url"], COUNT_TOKENS, raw)
            except EngineUnreachable:
                continue
            return Response(counted, media_type="application/json")
        raise ApiError(
            503, "no engine is ready to count; try again shortly", "unavailable", retry_after_s=5
        )

    def _own(self, raw: bytes) -> bytes:
        """A body as engines get it."""
        body = checked_body(raw, COUNT_TOKENS, self._settings)
        own = {**body, "model": self._settings.model_id}
        if "billing_header" in self._settings.volatile_text:
            own = without_billing_header(COUNT_TOKENS, own)
        return changed_body(raw, body, own)
