"""Errors as clients see them: their API's shape, the right status, and what to do."""

import json
import re
from typing import Any

from conserve import apis

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"


class ApiError(Exception):
    """A refusal or failure to be told to a client.

    Args:
        status: HTTP status.
        message: what is wrong and what to do, for a person.
        code: what is wrong, for a program (OpenAI's ``error.code``; Anthropic's shape has none).
        param: the request's field, if one is to blame.
        retry_after_s: when to try again, sent as ``Retry-After``.
        final: the same request will not do any better later; sent as ``x-should-retry: false``, by
            which OpenAI's clients leave it at that.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        *,
        param: str | None = None,
        retry_after_s: int | None = None,
        final: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.final = final

    def body(self, path: str = "") -> dict[str, Any]:
        """The response's JSON body: Anthropic's shape on its paths, else OpenAI's.

        Args:
            path: what was asked for.
        """
        if apis.is_anthropic(path):
            error = {"type": _anthropic_type(self.status), "message": _anthropic_message(self)}
            return {"type": "error", "error": error, "request_id": None}
        return {
            "error": {
                "message": self.message,
                "type": _error_type(self.status),
                "param": self.param,
                "code": self.code,
            }
        }

    def event(self, path: str, number: int = 0) -> bytes:
        """The event by which a stream that has begun ends with this error.

        Args:
            path: the turn's.
            number: of the event within the stream, where its events are numbered.
        """
        if path == apis.MESSAGES:
            return b"event: error\ndata: " + json.dumps(self.body(path)).encode() + b"\n\n"
        if path != apis.RESPONSES:
            return b"data: " + json.dumps(self.body()).encode() + b"\n\n"
        data = {
            "type": "error",
            "code": self.code or _error_type(self.status),
            "message": self.message,
            "param": self.param,
            "sequence_number": number,
        }
        return b"event: error\ndata: " + json.dumps(data).encode() + b"\n\n"


def _error_type(status: int) -> str:
    if status >= 500:
        return "server_error"
    return {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}.get(
        status, "invalid_request_error"
    )


# https://docs.anthropic.com/en/api/errors; 529 is "overloaded", which OpenAI's clients say by 503.
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def _anthropic_type(status: int) -> str:
    known = _ANTHROPIC_TYPES.get(status)
    return known or ("api_error" if status >= 500 else "invalid_request_error")


def _anthropic_message(error: ApiError) -> str:
    # Claude Code knows by these words that it has to compact its history.
    too_long = error.code == CONTEXT_LENGTH_EXCEEDED
    return f"prompt is too long: {error.message}" if too_long else error.message


# FastAPI's report of a bad body, as vLLM prints it; only place and complaint are for clients.
_INVALID = re.compile(r"'loc': \(([^)]*)\), 'msg': (\"[^\"]*\"|'(?:[^'\\]|\\.)*')")
# vLLM says it in several ways: a prompt over the context, a prompt with the output asked for, or
# the output alone. Not each mention of max_model_len is one: a truncation may be too long too.
_CONTEXT = re.compile(
    r"maximum (?:context|model) length|context length is only"
    r"|cannot be greater than max_model_len=|exceeds the max_model_len",
    re.IGNORECASE,
)


def from_engine(status: int, body: Any) -> ApiError:
    """An engine's error response as ours: same status and message, OpenAI's codes.

    Args:
        status: the engine's HTTP status.
        body: its parsed JSON body, of any shape.
    """
    error = body.get("error", body) if isinstance(body, dict) else {}
    message = error.get("message") if isinstance(error, dict) else None
    param = error.get("param") if isinstance(error, dict) else None
    if status < 400:
        status = 502  # An error was expected; whatever this is, it must not pass for a success.
    if status < 500 and not isinstance(message, str):
        return ApiError(status, "the engine refused the request and did not say why")
    if status >= 500 or not isinstance(message, str):
        # An engine's own failure may carry a traceback; that belongs into its log.
        return ApiError(
            status,
            "the engine failed on this request; try again, and see its log if it fails again",
            "engine_error",
        )
    complaints = _INVALID.findall(message)
    if complaints:
        location = [part.strip(" '") for part in complaints[0][0].split(",")]
        param = ".".join(part for part in location if part and part != "body")
        message = f"{param}: {complaints[0][1][1:-1]}"
    code = None
    if status == 400 and _CONTEXT.search(message):
        code = CONTEXT_LENGTH_EXCEEDED
    elif status == 404:
        code = "model_not_found"
    return ApiError(status, message, code, param=param if isinstance(param, str) else None)


def unknown_model(asked: str, served: str) -> ApiError:
    """The 404 that says which model there is instead."""
    return ApiError(
        404,
        f"the model {asked[:100]!r} is not served here; use {served!r}",
        "model_not_found",
        param="model",
    )


def context_length_exceeded(prompt_tokens: int, max_model_len: int) -> ApiError:
    """The error of a prompt that leaves no room for an answer within the model's context."""
    return ApiError(
        400,
        f"This model's maximum context length is {max_model_len} tokens, and the messages "
        f"have {prompt_tokens}. Shorten them.",
        CONTEXT_LENGTH_EXCEEDED,
        param="messages",
    )
