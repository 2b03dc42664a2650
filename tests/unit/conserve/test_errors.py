"""Errors as clients see them."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conserve.errors import ApiError, context_length_exceeded, from_engine

TRACEBACK = 'Traceback (most recent call last):\n  File "/opt/vllm/core.py", line 3\nKeyError: 7'


def vllm(message: str, param: str | None = None, status: int = 400) -> dict[str, Any]:
    """An error body as vLLM writes it; its ``code`` is the HTTP status."""
    kind = "BadRequestError" if status == 400 else "NotFoundError"
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


# --- The shape -----------------------------------------------------------------------------------


def test_the_body_is_openais() -> None:
    error = ApiError(429, "full", "queue_full", param="messages", retry_after_s=3)
    assert error.body() == {
        "error": {
            "message": "full",
            "type": "rate_limit_error",
            "param": "messages",
            "code": "queue_full",
        }
    }
    assert str(error) == "full"
    assert error.retry_after_s == 3


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "invalid_request_error"),
        (405, "invalid_request_error"),
        (413, "invalid_request_error"),
        (422, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "server_error"),
        (502, "server_error"),
        (503, "server_error"),
        (504, "server_error"),
    ],
)
def test_the_type_says_whose_fault_it_is(status: int, kind: str) -> None:
    assert ApiError(status, "m").body()["error"]["type"] == kind


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (408, "timeout_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_the_body_is_anthropics_on_its_paths(status: int, kind: str) -> None:
    error = ApiError(status, "m", "c", param="p")
    told = {"type": "error", "error": {"type": kind, "message": "m"}, "request_id": None}
    assert error.body("/v1/messages") == error.body("/v1/messages/count_tokens") == told
    for path in ("/v1/messagess", "/v1/responses", "/v1/models"):
        assert error.body(path) == error.body()


def test_claude_code_learns_that_it_has_to_compact() -> None:
    error = context_length_exceeded(20_000, 16_384)
    message = error.body("/v1/messages")["error"]["message"]
    assert message.startswith("prompt is too long: ")
    assert "16384" in message


def test_the_event_that_ends_a_stream_is_of_its_api() -> None:
    error = ApiError(503, "m", param="p")
    (chat,) = error.event("/v1/chat/completions", 3).splitlines()[:1]
    assert json.loads(chat.removeprefix(b"data: ")) == error.body()
    for path in ("/v1/messages", "/v1/responses"):
        kind, data = error.event(path, 3).splitlines()[:2]
        assert kind == b"event: error"
        assert json.loads(data.removeprefix(b"data: "))["type"] == "error"
    assert json.loads(data.removeprefix(b"data: ")) == {
        "type": "error",
        "code": "server_error",
        "message": "m",
        "param": "p",
        "sequence_number": 3,
    }


def test_what_is_not_known_is_null_and_not_missing() -> None:
    assert ApiError(500, "m").body()["error"] == {
        "message": "m", "type": "server_error", "param": None, "code": None,
    }  # fmt: skip


# --- From engines --------------------------------------------------------------------------------


def test_an_engines_refusal_keeps_status_message_and_field() -> None:
    error = from_engine(400, vllm("temperature must be non-negative, got -1.0.", "temperature"))
    assert (error.status, error.code, error.param) == (400, None, "temperature")
    assert error.message == "temperature must be non-negative, got -1.0."


def test_a_malformed_body_is_explained_without_repeating_it() -> None:
    # How vLLM prints a FastAPI validation error; `input` is what the client sent.
    error = from_engine(
        400,
        vllm(
            "2 validation errors:\n"
            "  {'type': 'list_type', 'loc': ('body', 'messages', 0, 'content'), "
            "'msg': 'Input should be a valid list', 'input': {'private': 'diary'}}\n"
            "  {'type': 'missing', 'loc': ('body', 'prompt'), 'msg': 'Field required', "
            "'input': {'private': 'diary'}}",
            "messages",
        ),
    )
    assert error.status == 400
    assert error.message == "messages.0.content: Input should be a valid list"
    assert error.param == "messages.0.content"
    assert "diary" not in json.dumps(error.body())


def test_an_unknown_model() -> None:
    error = from_engine(404, vllm("The model `gpt-9` does not exist.", "model", 404))
    assert (error.status, error.code) == (404, "model_not_found")
    assert "gpt-9" in error.message


def test_an_error_without_its_envelope() -> None:
    error = from_engine(400, {"object": "error", "message": "bad", "param": None, "code": 400})
    assert (error.status, error.message) == (400, "bad")


@pytest.mark.parametrize(
    "body",
    [
        None,
        [],
        ["message"],
        "Bad Request",
        7,
        {},
        {"detail": "Not Found"},
        {"detail": [{"loc": ["body"], "msg": "field required"}]},
        {"error": None},
        {"error": "text"},
        {"error": {"message": None}},
        {"error": {"message": {"nested": 1}}},
    ],
)
@pytest.mark.parametrize("status", [400, 404, 500])
def test_bodies_of_another_shape(status: int, body: Any) -> None:
    error = from_engine(status, body)
    assert error.status == status
    assert error.code == ("engine_error" if status >= 500 else None)
    assert error.message
    json.dumps(error.body())


@pytest.mark.parametrize("status", [500, 501, 502, 503])
def test_an_engines_own_failure_is_not_passed_on(status: int) -> None:
    error = from_engine(status, vllm(TRACEBACK, "secret_param"))
    assert error.status == status
    assert error.code == "engine_error"
    told = json.dumps(error.body())
    assert "Traceback" not in told
    assert "KeyError" not in told
    assert "secret_param" not in told


@pytest.mark.parametrize("status", [200, 204, 302])
@pytest.mark.parametrize("body", [None, vllm("message")])
def test_a_failure_is_never_told_as_a_success(status: int, body: Any) -> None:
    assert from_engine(status, body).status == 502


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["error", "message", "param", "detail", "x"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)


@given(st.integers(100, 599), JSON)
def test_any_answer_becomes_an_error_that_can_be_sent(status: int, body: Any) -> None:
    error = from_engine(status, body)
    assert 400 <= error.status <= 599
    sent = error.body()["error"]
    assert set(sent) == {"message", "type", "param", "code"}
    assert isinstance(sent["message"], str)
    assert sent["param"] is None or isinstance(sent["param"], str)
    json.dumps(sent)


# vLLM 0.29's wordings, as its modules print them.
TOO_LONG = {
    "renderers/params.py, tokens": (
        "This model's maximum context length is 8192 tokens. However, you requested 16 output "
        "tokens and your prompt contains at least 8177 input tokens, for a total of at least "
        "8193 tokens. Please reduce the length of the input prompt or the number of requested "
        "output tokens."
    ),
    "renderers/params.py, characters": (
        "This model's maximum context length is 8192 tokens. However, you requested 0 output "
        "tokens and your prompt contains 99999 characters (more than 81920 characters, which is "
        "the upper bound for 8192 input tokens). Please reduce the length of the input prompt or "
        "the number of requested output tokens."
    ),
    "renderers/params.py, output alone": (
        "max_completion_tokens=9000 cannot be greater than max_model_len=max_total_tokens=8192. "
        "Please request fewer output tokens."
    ),
    "renderers/params.py, output alone, older field": (
        "max_tokens=9000 cannot be greater than max_model_len=max_total_tokens=8192. "
        "Please request fewer output tokens."
    ),
    "entrypoints/serve/utils/api_utils.py": (
        "Input length (9000) exceeds model's maximum context length (8192)."
    ),
    "v1/engine/input_processor.py, prompt": (
        "The decoder prompt (length 9000) is longer than the maximum model length of 8192. Make "
        "sure that `max_model_len` is no smaller than the number of text tokens."
    ),
    "v1/engine/input_processor.py, no room for output": (
        "The decoder prompt (length 8192) plus the number of requested output tokens (at least "
        "1) is longer than the maximum model length of 8192. Make sure that `max_model_len` is "
        "no smaller than the number of text tokens (prompt + requested output tokens)."
    ),
}


@pytest.mark.parametrize("message", TOO_LONG.values(), ids=TOO_LONG.keys())
def test_a_prompt_over_the_context_is_named_so(message: str) -> None:
    error = from_engine(400, vllm(message, "input_tokens"))
    assert (error.status, error.code) == (400, "context_length_exceeded")
    assert error.message == message


@pytest.mark.parametrize(
    "message",
    [
        "The decoder prompt cannot be empty",
        # A truncation that was asked for is too long, not the prompt.
        "truncate_prompt_tokens=9000 cannot be greater than max_model_len - max_tokens = 8000. "
        "Please request a smaller truncation size.",
    ],
)
def test_other_refusals_are_not(message: str) -> None:
    assert from_engine(400, vllm(message)).code is None


def test_our_own_word_for_a_prompt_over_the_context() -> None:
    error = context_length_exceeded(9001, 8192)
    assert (error.status, error.code, error.param) == (400, "context_length_exceeded", "messages")
    assert "9001" in error.message
    assert "8192" in error.message
