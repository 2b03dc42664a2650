"""Responses that decoders keep: by their ids, for their clients and for the turns that go on.

A turn that goes on from a response by its id (``previous_response_id``) is made the turn that it
would have been had its client sent the history: it is recognised, placed and served as that.
"""

import asyncio
import json
import re
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from conserve import budget, identity, wire
from conserve.errors import ApiError
from conserve.settings import Settings
from deployments.router.access import caller_of
from deployments.router.reading import understood
from deployments.router.upstream import EngineUnreachable, Upstream
from deployments.table.table_client import TableClient

# Those that routers give; no other can be one, and this may stand in a URL.
_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
PREVIOUS = "previous_response_id"


class StoredResponses:
    """Finds responses at the decoders that have given them.

    Args:
        table: knows the decoders.
    """

    def __init__(self, settings: Settings, table: TableClient, upstream: Upstream) -> None:
        self._settings = settings
        self._table = table
        self._upstream = upstream

    async def with_history(self, raw: bytes, tenant: str | None) -> tuple[bytes, str | None]:
        """A turn's body with all of its history, and the id of the conversation that it goes on.

        Args:
            raw: JSON in UTF-8, as its client has sent it; where it names no response, it stays as
                it is, and the id is None.
            tenant: whose it is, where there are keys.

        Raises:
            ApiError: there is no such response, or the body is too large to look for one.
        """
        if PREVIOUS.encode() not in raw:
            return raw, None
        budget.check_raw(raw, chat=True)
        body = await understood(len(raw), _parsed, raw)
        response_id = body.get(PREVIOUS) if isinstance(body, dict) else None
        if response_id is None:
            return raw, None
        if not isinstance(response_id, str):
            raise ApiError(400, f"{PREVIOUS} must be a string", param=PREVIOUS)
        found = await self._find(response_id, tenant)
        if found is None:
            raise ApiError(
                404,
                f"no decoder keeps a response {response_id[:100]!r}: it was not stored, was one of "
                "the oldest, or is gone with its decoder; send the whole history as input",
                "previous_response_not_found",
                param=PREVIOUS,
            )
        before = len(found.request) + len(found.response)
        whole = await understood(before + len(raw), _with_history, body, found)
        if len(whole) > self._settings.max_body_bytes:
            raise ApiError(
                413,
                f"the body and its history are longer than {self._settings.max_body_bytes} bytes",
                "body_too_long",
            )
        return whole, identity.conversation_of(found.conversation_id)

    async def retrieve(self, request: Request) -> Response:
        """``GET /v1/responses/{id}``."""
        if request.query_params.get("stream") in ("true", "1"):
            raise ApiError(
                400,
                "only a response in the background could be streamed again, and none is served",
                "unsupported_value",
                param="stream",
            )
        found = await self._require(request)
        return Response(bytes(found.response), media_type="application/json")

    async def cancel(self, request: Request) -> Response:
        """``POST /v1/responses/{id}/cancel``."""
        await self._require(request)
        raise ApiError(
            400,
            "only a response in the background could be cancelled, and none is served; a client "
            "ends one that is under way by closing its connection",
            param="id",
        )

    async def delete(self, request: Request) -> Response:
        """``DELETE /v1/responses/{id}``."""
        response_id = request.path_params["id"]
        told = await self._ask_decoders("DELETE", response_id, _tenant(request))
        if not told:
            raise _not_found(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    async def _require(self, request: Request) -> wire.StoredResponse:
        response_id = request.path_params["id"]
        found = await self._find(response_id, _tenant(request))
        if found is None:
            raise _not_found(response_id)
        return found

    async def _find(self, response_id: str, tenant: str | None) -> wire.StoredResponse | None:
        told = await self._ask_decoders("GET", response_id, tenant)
        return _STORED.decode(told[0]) if told else None

    async def _ask_decoders(self, method: Any, response_id: str, tenant: str | None) -> list[bytes]:
        if not _ID.fullmatch(response_id):
            return []
        engines = await self._table.call("engines")
        urls = [engine["url"] for engine in engines if engine["hosts"]]
        asked = [self._ask(method, url, response_id, tenant) for url in urls]
        return [told for told in await asyncio.gather(*asked) if told is not None]

    async def _ask(
        self, method: Any, url: str, response_id: str, tenant: str | None
    ) -> bytes | None:
        try:
            return await self._upstream.stored(method, url, response_id, tenant)
        except EngineUnreachable:
            return None  # What it has kept is gone with it.


_STORED = msgspec.json.Decoder(wire.StoredResponse)


def _tenant(request: Request) -> str | None:
    caller = caller_of(request.scope)
    return None if caller is None else caller.tenant


def _not_found(response_id: str) -> ApiError:
    return ApiError(
        404,
        f"no decoder keeps a response {response_id[:100]!r}: it was not stored, was one of the "
        "oldest, or is gone with its decoder",
        "response_not_found",
        param="id",
    )


def _parsed(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None  # It is refused where it is read.


def _with_history(body: dict[str, Any], found: wire.StoredResponse) -> bytes:
    before = json.loads(bytes(found.request)).get("input")
    output = json.loads(bytes(found.response))["output"]
    whole = {name: value for name, value in body.items() if name != PREVIOUS}
    whole["input"] = [*_items(before), *output, *_items(body.get("input"))]
    return json.dumps(whole).encode()


def _items(given: Any) -> list[Any]:
    if isinstance(given, list):
        return given
    # What is neither is for the budget to refuse.
    return [{"role": "user", "content": given} if isinstance(given, str) else given]
