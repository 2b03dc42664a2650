"""Answers and errors as HTTP responses."""

import msgspec
from starlette.responses import JSONResponse, Response

from conserve.errors import ApiError
from deployments.answers import Answer

TABLE_RESTARTING = ApiError(
    503,
    "the conversation table is being restarted; try again",
    "unavailable",
    retry_after_s=2,
)


def answer_response(answer: Answer, status: int = 200) -> Response:
    """Return an answer as JSON."""
    return Response(msgspec.json.encode(answer), status, media_type="application/json")


def error_response(error: ApiError, path: str) -> Response:
    """A client's view of an error, in the shape of the API that the path is of."""
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.final:
        headers["x-should-retry"] = "false"
    return JSONResponse(error.body(path), status_code=error.status, headers=headers)
