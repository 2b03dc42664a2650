"""Finds responses that decoders keep, by their ids, for clients and for turns that go on from them.

A turn that names a response (``previous_response_id``) or its items (``item_reference``) is made
the turn that it would be if its client had sent the history. It is served as that.
"""

import asyncio
import json
import re
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from conserve import budget, identity, wire
from conserve.errors import ApiError
from conserve.items import REFERENCE, item_id, response_of
from conserve.media import Lifted
from conserve.settings import Settings
from deployments import answers
from deployments.router.access import tenant_of
from deployments.router.conversations import number
from deployments.router.errors import answer_response
from deployments.router.reading import lifted_text, most_bytes, understood
from deployments.router.upstream import EngineUnreachable, Upstream
from deployments.table_client import TableClient
from deployments.tables import Tables

# Routers give no other ids, and these may stand in a URL.
_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
PREVIOUS = "previous_response_id"
# A response is kept with its history, so the newest has the items of the others. A history that was
# edited again and again may need several.
_MOST_LOOKED_UP = 16


@dataclass(eq=False)
class StoredResponses:
    """Finds responses at the decoders that have given them."""

    settings: Settings
    table: TableClient | Tables
    upstream: Upstream

    async def with_history(self, lifted: Lifted, tenant: str | None) -> str | None:
        """Put a turn's whole history into its body; returns the conversation that it continues.

        If it names no response, its body stays, and None is returned. Raises `ApiError` if there is
        no such response, or the body is too large to look for one.
        """
        if not any(name in lifted.raw for name in _NAMES):
            return None
        body = await understood(lifted, _parsed, lifted.raw)
        if not isinstance(body, dict):
            return None
        previous_id = body.get(PREVIOUS)
        items: Any = body.get("input")
        referring = isinstance(items, list) and any(map(_is_reference, items))
        if previous_id is None and not referring:
            return None
        conversation_id: str | None = None
        found: wire.StoredResponse | None = None
        if previous_id is not None:
            found = await self._previous(previous_id, tenant, lifted)
            conversation_id = found.history_id
        if referring:
            body["input"], named_id = await self._with_items(items, tenant, lifted)
            conversation_id = conversation_id or named_id
        before = 0 if found is None else _size(found)
        lifted.raw = await understood(lifted, _whole, body, found, more=before)
        limit = most_bytes(self.settings)
        if lifted.size > limit:
            raise ApiError(
                413, f"the body and its history are longer than {limit} bytes", "body_too_long"
            )
        assert conversation_id is not None
        return identity.conversation_of(conversation_id)

    async def _previous(
        self, response_id: Any, tenant: str | None, lifted: Lifted
    ) -> wire.StoredResponse:
        if not isinstance(response_id, str):
            raise ApiError(400, f"{PREVIOUS} must be a string", param=PREVIOUS)
        found = await self._find(response_id, tenant, lifted)
        if found is None:
            raise ApiError(
                404,
                f"Previous response with id {response_id[:100]!r} not found: it was not stored, "
                "was one of the oldest, or is gone with its decoder; send the whole history as "
                "input",
                "previous_response_not_found",
                param=PREVIOUS,
            )
        return found

    async def _with_items(
        self, given: list[Any], tenant: str | None, lifted: Lifted
    ) -> tuple[list[Any], str]:
        """Put items in the place of references; returns the newest's conversation, too.

        The items' long texts are added to ``lifted``, the turn's body.
        """
        known: dict[str, Any] = {}
        looked_up: list[wire.StoredResponse] = []
        items = [*given]
        for position in reversed(range(len(items))):
            if not _is_reference(items[position]):
                continue
            where, id_ = f"input[{position}]", items[position].get("id")
            if not isinstance(id_, str):
                raise ApiError(400, f"{where}.id must be a string", param=f"{where}.id")
            if id_ not in known:
                response_id = response_of(id_)
                found = (
                    None if response_id is None else await self._find(response_id, tenant, lifted)
                )
                if found is None:
                    raise _no_item(id_, where)
                looked_up.append(found)
                # A response takes as long to read as a body.
                size = sum(map(_size, looked_up))
                held = size + sum(map(len, lifted.spans.values()))
                if len(looked_up) > _MOST_LOOKED_UP or held > 2 * most_bytes(self.settings):
                    raise ApiError(
                        400,
                        f"{where}: the items that are named are of too many responses, or of too "
                        "long ones; send some of them whole",
                        param=where,
                    )
                known |= await understood(lifted, _by_id, found, more=size)
            if id_ not in known:
                raise _no_item(id_, where)
            # No item is named twice: else a short body could become one without bounds.
            items[position] = known[id_]
            known[id_] = None
            if items[position] is None:
                raise ApiError(400, f"{where} names an item for the second time", param=where)
        return items, looked_up[0].history_id

    async def retrieve(self, request: Request) -> Response:
        """``GET /v1/responses/{id}``."""
        if request.query_params.get("stream") in ("true", "1"):
            raise ApiError(
                400,
                "only a response in the background could be streamed again, and none is served",
                "unsupported_value",
                param="stream",
            )
        lifted = Lifted(b"")
        found = await self._require(request, lifted)
        response = lifted.put_back(bytes(found.response))
        return Response(response, media_type="application/json")

    async def input_items(self, request: Request) -> Response:
        """``GET /v1/responses/{id}/input_items``."""
        query = request.query_params
        limit, order = number(request, "limit", 20, 100), query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise ApiError(400, "order must be asc or desc", param="order")
        lifted = Lifted(b"")
        found = await self._require(request, lifted)
        asked = (request.path_params["id"], query.get("after"), limit, order == "desc")
        page = await understood(lifted, _page, found, *asked, more=_size(found))
        return Response(lifted.put_back(page), media_type="application/json")

    async def cancel(self, request: Request) -> Response:
        """``POST /v1/responses/{id}/cancel``."""
        await self._require(request, Lifted(b""))
        raise ApiError(
            400,
            "Cannot cancel a synchronous response. Only one in the background could be, and none "
            "is served; a client ends one that is under way by closing its connection",
            param="id",
        )

    async def delete(self, request: Request) -> Response:
        """``DELETE /v1/responses/{id}``."""
        response_id = request.path_params["id"]
        told = await self._ask_decoders("DELETE", response_id, tenant_of(request.scope))
        if not told:
            raise _not_found(response_id)
        return answer_response(answers.ResponseDeleted(response_id, True))

    async def _require(self, request: Request, lifted: Lifted) -> wire.StoredResponse:
        response_id = request.path_params["id"]
        found = await self._find(response_id, tenant_of(request.scope), lifted)
        if found is None:
            raise _not_found(response_id)
        return found

    async def _find(
        self, response_id: str, tenant: str | None, lifted: Lifted
    ) -> wire.StoredResponse | None:
        """Return what a decoder keeps of a response; its long texts are added to ``lifted``."""
        told = await self._ask_decoders("GET", response_id, tenant)
        if not told:
            return None
        return _STORED.decode(await lifted_text(told[0], lifted))

    async def _ask_decoders(self, method: Any, response_id: str, tenant: str | None) -> list[bytes]:
        if not _ID.fullmatch(response_id):
            return []
        engines = await self.table.engines()
        urls = [engine.url for engine in engines if engine.hosts]
        asked = [self._ask(method, url, response_id, tenant) for url in urls]
        return [told for told in await asyncio.gather(*asked) if told is not None]

    async def _ask(
        self, method: Any, url: str, response_id: str, tenant: str | None
    ) -> bytes | None:
        try:
            return await self.upstream.stored(method, url, response_id, tenant)
        except EngineUnreachable:
            return None  # Its responses are gone with it.


_STORED = msgspec.json.Decoder(wire.StoredResponse)
_NAMES = (PREVIOUS.encode(), REFERENCE.encode())


def _not_found(response_id: str) -> ApiError:
    return ApiError(
        404,
        f"Response with id {response_id[:100]!r} not found: it was not stored, was one of the "
        "oldest, or is gone with its decoder",
        "response_not_found",
        param="id",
    )


def _parsed(raw: bytes) -> Any:
    """Parse a body; return None if it is no JSON."""
    budget.check_raw(raw, chat=True)
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None  # It is refused where it is read.


def _whole(body: dict[str, Any], found: wire.StoredResponse | None) -> bytes:
    """Return a body that follows the history of ``found``, and names no response."""
    whole = {name: value for name, value in body.items() if name != PREVIOUS}
    if found is not None:
        whole["input"] = [*_kept(found), *_items(body.get("input"))]
    return json.dumps(whole).encode()


def _size(found: wire.StoredResponse) -> int:
    return len(found.request) + len(found.response)


def _kept(found: wire.StoredResponse) -> list[Any]:
    """Return the items that a response answers, and its own."""
    before = json.loads(bytes(found.request)).get("input")
    output: list[Any] = json.loads(bytes(found.response))["output"]
    return [*_items(before), *output]


def _page(
    found: wire.StoredResponse, response_id: str, after: str | None, limit: int, newest_first: bool
) -> bytes:
    given = _items(json.loads(bytes(found.request)).get("input"))
    items = [_with_id(item, response_id, position) for position, item in enumerate(given)]
    items = items[::-1] if newest_first else items
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise ApiError(400, "after must be the id of an item of this list", param="after")
    # A client may have given several items this id; the last one leads on.
    begin = 0 if after is None else len(ids) - ids[::-1].index(after)
    shown = ids[begin : begin + limit] or [None]
    page = items[begin : begin + limit]
    more = begin + limit < len(items)
    return msgspec.json.encode(answers.InputItems(page, shown[0], shown[-1], more))


def _with_id(item: dict[str, Any], response_id: str, position: int) -> dict[str, Any]:
    kind = item.get("type", "message")
    own = {"id": item_id(f"{response_id}_in", kind, position), "type": kind, **item}
    if kind == "message" and isinstance(text := own["content"], str):
        part = "output_text" if own["role"] == "assistant" else "input_text"
        own["content"] = [{"type": part, "text": text}]
    return own


def _by_id(found: wire.StoredResponse) -> dict[str, Any]:
    return {
        item["id"]: item
        for item in _kept(found)
        if isinstance(item, dict) and isinstance(item.get("id"), str)
    }


def _is_reference(item: Any) -> bool:
    return isinstance(item, dict) and item.get("type") == REFERENCE


def _no_item(item_id: str, where: str) -> ApiError:
    return ApiError(
        404,
        f"{where}: Item with id {item_id[:100]!r} not found: its response was not stored, was "
        "one of the oldest, or is gone with its decoder; send the item itself",
        "item_not_found",
        param=where,
    )


def _items(given: Any) -> list[Any]:
    if isinstance(given, list):
        return given
    # Any other value is refused with the rest of the body.
    return [{"role": "user", "content": given} if isinstance(given, str) else given]
