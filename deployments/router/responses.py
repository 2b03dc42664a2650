"""Errors as HTTP responses."""

from starlette.responses import JSONResponse, Response

from conserve.errors import ApiError

TABLE_RESTARTING = ApiError(
    503,
    "the conversation table is being restarted; try again",
    "unavailable",
    retry_after_s=2,
)


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
