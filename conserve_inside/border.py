"""Holds the border between an engine's decodes and its lane, for ``conserve profile``."""

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

# In an engine's own HTTP server. The answer to a `HoldBorder`: decodes' possible SMs; null without
# a lane.
BORDER_PATH = "/conserve/border"


class HoldBorder(msgspec.Struct, frozen=True, tag=True):
    """Keep decodes on this many of an engine's SMs for a while; 0 s: move the border as usual."""

    decode_sms: Annotated[int, msgspec.Meta(ge=0)] = 0
    for_s: Annotated[float, msgspec.Meta(ge=0, le=600)] = 0.0


def offer_border(app: Starlette, command: Callable[[HoldBorder], Awaitable[Any]]) -> None:
    """Serve `BORDER_PATH` in an engine's app; ``command`` has its scheduler obey."""

    async def hold_border(request: Request) -> Response:
        # A page in a browser on this machine cannot send this type without asking first.
        if request.headers.get("content-type") != "application/json":
            return JSONResponse({"error": "send application/json"}, 415)
        try:
            asked = msgspec.json.decode(await request.body(), type=HoldBorder)
        except msgspec.DecodeError as error:
            return JSONResponse({"error": f"no HoldBorder: {error}"}, 400)
        return JSONResponse(await command(asked))

    app.add_route(BORDER_PATH, hold_border, methods=["POST"])
