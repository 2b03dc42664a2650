"""Answers and errors as HTTP responses, and their names; slow refusals come later.

Each request is named by the client's `X-Request-Id` or by an id of ours. Ids that clients choose
may repeat, and tell requests apart for people alone.

A request that is refused takes time of the threads and cores that all tokens come from. Where that
was little, it is answered at once. Else its client waits for several times as long, so that of a
connection that sends nothing but the worst, a third or less is looked at.
"""

import asyncio
import secrets
import time

import msgspec
from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import Scope, Send

from conserve.apis import is_anthropic
from conserve.errors import REQUEST_ID, ApiError
from deployments.answers import Answer

RawHeaders = list[tuple[bytes, bytes]]

TABLE_RESTARTING = ApiError(
    503, "the conversation table is being restarted; try again", "unavailable", retry_after_s=2
)

ENDING = ApiError(
    503,
    "the server is being stopped and takes no new turns; send the turn again once it is back",
    "unavailable",
    retry_after_s=30,
)

ID_HEADER = "x-request-id"
_MOST_ID_CHARS = 128
_ID = "conserve.request_id"

# For bodies of requests.
CODINGS = ("gzip", "deflate")
UNKNOWN_CODING = "unsupported_content_encoding"

_FREE_S = 0.025
_TIMES = 4
_LONGEST_S = 4.0
_ABOUT_THE_REQUEST = (400, 413, 422)
# All decoders were asked.
_SEARCHED_FOR = ("previous_response_not_found", "response_not_found")


def answer_response(answer: Answer, status: int = 200) -> Response:
    return Response(msgspec.json.encode(answer), status, media_type="application/json")


def error_response(error: ApiError, path: str) -> Response:
    """Return an error as a client sees it, in the shape of the path's API."""
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.code == UNKNOWN_CODING:
        # https://www.rfc-editor.org/rfc/rfc9110#section-15.5.16
        headers["Accept-Encoding"] = ", ".join(CODINGS)
    if error.final:
        headers["x-should-retry"] = "false"
    return JSONResponse(error.body(path), status_code=error.status, headers=headers)


async def refuse(error: ApiError, own_headers: RawHeaders, send: Send, path: str) -> None:
    response = error_response(error, path)
    response.raw_headers += own_headers
    # It is written whole, without a look at what comes.
    await response({"type": "http"}, None, send)  # type: ignore[arg-type]


async def hold_back(error: ApiError, arrived_s: float) -> None:
    """Wait before a request is refused that is itself to blame."""
    if error.status in _ABOUT_THE_REQUEST or error.code in _SEARCHED_FOR:
        await asyncio.sleep(wait_s(time.perf_counter() - arrived_s))


def wait_s(took_s: float) -> float:
    """Return how long to hold back a refusal that took so long to find."""
    return min(_LONGEST_S, _TIMES * max(0.0, took_s - _FREE_S))


def request_id_of(scope: Scope) -> str:
    """Return a request's id: the client's if it can be shown as it is, or else one of ours."""
    if _ID not in scope:
        given = Headers(scope=scope).get(ID_HEADER, "")
        usable = 0 < len(given) <= _MOST_ID_CHARS and given.isascii() and given.isprintable()
        scope[_ID] = given if usable else secrets.token_hex(16)
    id_: str = scope[_ID]
    return id_


def named(scope: Scope) -> RawHeaders:
    """Name a request, for errors too; return the headers of its answer."""
    id_ = request_id_of(scope)
    REQUEST_ID.set(id_)
    headers = [(ID_HEADER.encode(), id_.encode())]
    if is_anthropic(scope["path"]):
        headers.append((b"request-id", id_.encode()))
    return headers
