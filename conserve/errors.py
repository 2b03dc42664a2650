"""Errors as clients see them: in their API's form, with the right status, and what to do."""

import json
import re
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import msgspec

from conserve import apis
from conserve.complaints import complaint_in

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"


class Told(NamedTuple):
    """An error's message, and the request's field at fault, if any."""

    message: str
    param: str | None


class ErrorDetails(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(msgspec.Struct, frozen=True):
    """An error in OpenAI's shape."""

    error: ErrorDetails


class AnthropicErrorDetails(msgspec.Struct, frozen=True):
    type: str
    message: str


class AnthropicError(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    """An error in Anthropic's shape."""

    error: AnthropicErrorDetails
    request_id: str | None


# The id of the request that is answered, for errors in Anthropic's shape.
REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)

# Messages become chats before vLLM checks them: the field that it blames, and the client's.
_IN_MESSAGES = {"stop": "stop_sequences", "max_completion_tokens": "max_tokens"}
# vLLM's words of the field that chats and responses call top_logprobs.
_TOO_MANY = "Requested sample logprobs"
_OF_CHATS = re.compile(rf"^(?:{'|'.join(_IN_MESSAGES)})\b")


class ApiError(Exception):
    """A refusal or failure, for a client.

    Args:
        message: what is wrong and what to do, for people.
        code: what is wrong, for programs (OpenAI's ``error.code``; Anthropic's form has none).
        param: the request's field, if one is at fault.
        final: whether a retry is useless; sent as ``x-should-retry: false``, which OpenAI's clients
            obey.
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

    def told(self, path: str) -> Told:
        if not apis.is_anthropic(path):
            if path != apis.COMPLETIONS and self.message.startswith(_TOO_MANY):
                return Told(self.message.replace("sample logprobs", "top_logprobs"), "top_logprobs")
            return Told(self.message, self.param)
        message = _OF_CHATS.sub(lambda field: _IN_MESSAGES[field[0]], self.message)
        # Claude Code knows by these words that it has to compact its history.
        too_long = self.code == CONTEXT_LENGTH_EXCEEDED
        return Told(f"prompt is too long: {message}" if too_long else message, None)

    def body(self, path: str = "") -> dict[str, Any]:
        """Return the response's JSON body: Anthropic's form on its paths, else OpenAI's."""
        message, param = self.told(path)
        told: Error | AnthropicError
        if apis.is_anthropic(path):
            other = "api_error" if self.status >= 500 else "invalid_request_error"
            details = AnthropicErrorDetails(_ANTHROPIC_TYPES.get(self.status, other), message)
            told = AnthropicError(details, REQUEST_ID.get())
        else:
            told = Error(ErrorDetails(message, _error_type(self.status), param, self.code))
        body: dict[str, Any] = msgspec.to_builtins(told)
        return body

    def event(self, path: str, number: int = 0) -> bytes:
        """Return the event by which a stream that has begun ends with this error."""
        if path == apis.MESSAGES:
            return b"event: error\ndata: " + json.dumps(self.body(path)).encode() + b"\n\n"
        if path != apis.RESPONSES:
            return b"data: " + json.dumps(self.body(path)).encode() + b"\n\n"
        message, param = self.told(path)
        data = {
            "type": "error",
            "code": self.code or _error_type(self.status),
            "message": message,
            "param": param,
            "sequence_number": number,
        }
        return b"event: error\ndata: " + json.dumps(data).encode() + b"\n\n"


def _error_type(status: int) -> str:
    if status >= 500:
        return "server_error"
    return {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}.get(
        status, "invalid_request_error"
    )


# https://docs.anthropic.com/en/api/errors; 503 stands for 529, "overloaded".
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


class PromptTooLong(ApiError):
    """A prompt that leaves no room for an answer: its client has to shorten the history.

    ``length`` is in tokens, or in ``characters`` of a prompt that was not tokenized.
    """

    def __init__(self, length: int, max_model_len: int, *, characters: bool = False) -> None:
        # A prompt that is as long as the context leaves no room either.
        self._most_tokens = min(max_model_len, length - 1)
        self._length = f"{length} {'characters' if characters else 'tokens'}"
        super().__init__(400, self._said("messages"), CONTEXT_LENGTH_EXCEEDED, param="messages")

    def told(self, path: str) -> Told:
        """Return OpenAI's words, or Anthropic's that make Claude Code compact its history."""
        if apis.is_anthropic(path):
            unit = "" if self._length.endswith("tokens") else "tokens "
            return Told(
                f"prompt is too long: {self._length} > {self._most_tokens} {unit}maximum", None
            )
        field = next((name for of, name in _PROMPTS.items() if path.startswith(of)), "messages")
        return Told(self._said(field), field)

    def _said(self, field: str) -> str:
        return (
            f"This model's maximum context length is {self._most_tokens} tokens. However, your "
            f"{field} resulted in {self._length}. Please reduce the length of the {field}."
        )


# The fields of prompts that are no list of messages, by the path's prefix.
_PROMPTS = {apis.COMPLETIONS: "prompt", apis.RESPONSES: "input"}


class OutputTooLong(ApiError):
    """More output asked for than the context has room for after a prompt that fits.

    Its words must not be those by which clients know that they have to compact their history: they
    would do so again and again. ``param`` is the field by which the output was asked for.
    """

    def __init__(
        self, output_tokens: int, max_model_len: int, prompt_tokens: int | None, param: str
    ) -> None:
        self._tokens = (prompt_tokens, output_tokens, max_model_len)
        most_tokens = max_model_len - (prompt_tokens or 0)
        behind = "" if prompt_tokens is None else f" behind a prompt of {prompt_tokens}"
        super().__init__(
            400,
            f"{param} is too large: {output_tokens}. This model supports at most {most_tokens} "
            f"output tokens{behind}; ask for no more.",
            "invalid_value",
            param=param,
        )

    def told(self, path: str) -> Told:
        """Blame only the cap if it is too large by itself."""
        if not apis.is_anthropic(path):
            return super().told(path)
        prompt_tokens, output_tokens, most_tokens = self._tokens
        if prompt_tokens is None or output_tokens > most_tokens:
            return Told(
                f"max_tokens: {output_tokens} > {most_tokens}, which is the maximum allowed number "
                "of output tokens for this model",
                None,
            )
        return Told(
            f"input length and `max_tokens` exceed context limit: {prompt_tokens} + "
            f"{output_tokens} > {most_tokens}, decrease input length or `max_tokens` and try again",
            None,
        )


# vLLM's messages about a prompt and the output asked for, or about one of them.
_TOO_LONG = [
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"maximum context length is (?P<most>\d+) tokens\. However, "
        r"(?:you requested (?P<output>\d+) output tokens and )?"
        r"your prompt contains (?:at least )?(?P<prompt>\d+) input tokens",
        r"(?P<param>\w+)=(?P<output>\d+) cannot be greater than "
        r"max_model_len=(?P<most>\d+)",
        r"Input length \((?P<prompt>\d+)\) exceeds model's maximum context length "
        r"\((?P<most>\d+)\)",
        r"prompt \(length (?P<prompt>\d+)\) .*longer than the maximum model length of "
        r"(?P<most>\d+)",
        r"prompt length (?P<prompt>\d+) exceeds the max_model_len (?P<most>\d+)",
        r"maximum context length is (?P<most>\d+) tokens\. .*prompt contains (?P<characters>\d+) "
        r"characters",
    )
]
# Other messages about it, without numbers.
_CONTEXT = re.compile(r"maximum (?:context|model) length|context length is only", re.IGNORECASE)


def _does_not_fit(message: str, param: Any) -> ApiError | None:
    for pattern in _TOO_LONG:
        found = pattern.search(message)
        if found is None:
            continue
        said = found.groupdict()
        most_tokens, output = int(said["most"]), said.get("output")
        if "characters" in said:
            return PromptTooLong(int(said["characters"]), most_tokens, characters=True)
        prompt_tokens = int(said["prompt"]) if "prompt" in said else None
        if prompt_tokens is not None and (output is None or prompt_tokens >= most_tokens):
            return PromptTooLong(prompt_tokens, most_tokens)
        field = said.get("param") or (param if isinstance(param, str) else "max_tokens")
        return OutputTooLong(int(output or 0), most_tokens, prompt_tokens, field)
    return None


# Endings of messages for vLLM's programmers: its own names of fields, and a class's parameters.
_INNER = re.compile(r"(?: \(parameter=[\w.]+(?:, value=.*)?\)|: \{'json': .*\})\Z", re.DOTALL)
# Python's messages about values that some code did not expect.
_PYTHONS = re.compile(
    r"'\w+' object|got multiple values|unsupported operand|instance, \w+ found"
    r"|can only concatenate|indices must be|TextEncodeInput"
)
_NO_MEDIA = re.compile(r"\S+ is not a multimodal model")


def from_engine(status: int, body: Any) -> ApiError:
    """Convert an engine's error: same status and message, the API's own codes and words."""
    error = body.get("error", body) if isinstance(body, dict) else {}
    message = error.get("message") if isinstance(error, dict) else None
    param = error.get("param") if isinstance(error, dict) else None
    if status < 400:
        status = 502  # An error was expected, so this must not count as a success.
    if status >= 500:
        # An engine's own failure may carry a traceback; that belongs into its log.
        return ApiError(
            status,
            "the engine failed on this request; try again, and see its log if it fails again",
            "engine_error",
        )
    if not isinstance(message, str) or not message:
        return ApiError(status, "the engine refused the request and did not say why")
    too_long = _does_not_fit(message, param) if status == 400 else None
    if too_long is not None:
        return too_long
    complaint = complaint_in(message)
    if complaint is not None:
        param = complaint.field or None
        message = f"{complaint.field}: {complaint.message}".removeprefix(": ")
    elif _PYTHONS.search(message):
        message = (
            "the model's chat template or tokenizer does not take a value of this request; check "
            "the types of those in messages, tools and chat_template_kwargs"
        )
    elif _NO_MEDIA.match(message):
        message = "this model reads text only; send no images, audio or video"
    message = _INNER.sub("", message)
    code = None
    if status == 400 and _CONTEXT.search(message):
        code = CONTEXT_LENGTH_EXCEEDED
    elif status == 404:
        code = "model_not_found"
    return ApiError(status, message, code, param=param if isinstance(param, str) else None)


def unfit(where: str, what: str) -> ApiError:
    """Return the refusal of a field, or a part of one, which is named."""
    return ApiError(400, f"{where} {what}", param=where)


def unknown_model(asked: str, served: Sequence[str]) -> ApiError:
    """Return the refusal of a model that is not among those that a caller may use."""
    names = " or ".join(map(repr, served)) or "another key: this one is for no model here"
    return ApiError(
        404,
        f"the model {asked[:100]!r} is not served here; use {names}",
        "model_not_found",
        param="model",
    )
