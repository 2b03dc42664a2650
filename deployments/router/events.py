"""Serves ``GET /v1/events``: what happens at the boundaries of turns, as server-sent events."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from conserve import identity
from conserve.errors import ApiError
from conserve.events import KINDS
from deployments.messages import EventQuery
from deployments.table_client import TableClient, TableUnavailable

# The table writes the events anew for each of them.
_LISTENERS = 16
# After so long without an event, a comment shows that the stream lives.
_QUIET_S = 10.0
_BROWSERS_HEADER = "last-event-id"
MOST_DIGITS = 18


class Events:
    """Tells listeners what happens, from now on or from where they were.

    An event's ``id`` is its number, its ``event`` the kind, and its ``data`` is JSON. A ``missed``
    event counts those that are no longer kept. A stream ends only with its router (``ends``); its
    listener goes on at another one, from where it was.
    """

    def __init__(self, table: TableClient, ends: Callable[[], bool] = lambda: False) -> None:
        self._table = table
        self._ends = ends
        self._listeners = 0

    async def serve(self, request: Request) -> Response:
        """Answer a listener."""
        after, kinds = _after(request), _kinds(request)
        tenant, own_id = (request.query_params.get(name) for name in ("tenant", "conversation"))
        conversation_id = None if own_id is None else identity.scoped(tenant, own_id)
        if self._listeners >= _LISTENERS:
            raise ApiError(
                429, f"{_LISTENERS} listen already; try again later", "too_many_listeners",
                retry_after_s=30,
            )  # fmt: skip
        told = self._told(EventQuery(after, kinds, tenant, conversation_id))
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        return StreamingResponse(told, media_type="text/event-stream", headers=headers)

    async def _told(self, query: EventQuery) -> AsyncIterator[bytes]:
        self._listeners += 1
        try:
            # Headers are sent with the first words.
            yield b": events\n\n"
            while not self._ends():
                try:
                    page = await self._table.events(query)
                except TableUnavailable:
                    yield b": the conversation table is being restarted\n\n"
                    await asyncio.sleep(1)
                    continue
                if page.missed:
                    yield b'event: missed\ndata: {"events":%d}\n\n' % page.missed
                for number, kind, data in page.events:
                    yield b"id: %d\nevent: %b\ndata: %b\n\n" % (number, kind.encode(), data)
                if query.after is not None and not page.events:
                    yield b": nothing new\n\n"
                # At first, without a wait: where the log is now.
                query = dataclasses.replace(query, after=page.newest, patience_s=_QUIET_S)
        finally:
            self._listeners -= 1


def _after(request: Request) -> int | None:
    """Return the number after which to begin; None: with what happens from now on."""
    text = request.headers.get(_BROWSERS_HEADER) or request.query_params.get("after")
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS):
        raise ApiError(400, "after must be the number of an event", param="after")
    return int(text)


def _kinds(request: Request) -> tuple[str, ...]:
    kinds = tuple(request.query_params.getlist("kind"))
    for kind in kinds:
        if kind not in KINDS:
            raise ApiError(400, f"kind {kind[:40]!r}: there are {', '.join(KINDS)}", param="kind")
    return kinds
