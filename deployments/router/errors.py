"""Answers and errors as HTTP responses; refusals that took long to find come later.

A request that is refused takes time of the threads and cores that all tokens come from. Where that
was little, it is answered at once. Else its client waits for several times as long, so that of a
connection that sends nothing but the worst, a third or less is looked at.
"""

import asyncio
import time

import msgspec
from starlette.responses import JSONResponse, Response
from starlette.types import Send

from conserve.errors import ApiError
from deployments.answers import Answer

RawHeaders = list[tuple[bytes, bytes]]

TABLE_RESTARTING = ApiError(
    503,
    "the conversation table is being restarted; try again",
    "unavailable",
    retry_after_s=2,
)

ENDING = ApiError(
    503,
    "the server is being stopped and takes no new turns; send the turn again once it is back",
    "unavailable",
    retry_after_s=30,
)

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
    """Return an answer as JSON."""
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
    """Answer with an error and nothing else."""
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
