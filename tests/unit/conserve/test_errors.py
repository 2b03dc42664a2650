"""Errors as clients see them."""

import json
import re
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from conserve.apis import CHAT, COMPLETIONS, COUNT_TOKENS, MESSAGES, RESPONSES
from conserve.errors import ApiError, OutputTooLong, from_engine

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
    # What is not known is null, and not missing.
    assert ApiError(500, "m").body()["error"] == {
        "message": "m", "type": "server_error", "param": None, "code": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("status", "openais", "anthropics"),
    [
        (400, "invalid_request_error", "invalid_request_error"),
        (401, "authentication_error", "authentication_error"),
        (403, "permission_error", "permission_error"),
        (404, "invalid_request_error", "not_found_error"),
        (405, "invalid_request_error", "invalid_request_error"),
        (408, "invalid_request_error", "timeout_error"),
        (413, "invalid_request_error", "request_too_large"),
        (422, "invalid_request_error", "invalid_request_error"),
        (429, "rate_limit_error", "rate_limit_error"),
        (500, "server_error", "api_error"),
        (502, "server_error", "api_error"),
        (503, "server_error", "overloaded_error"),
        (504, "server_error", "timeout_error"),
    ],
)
def test_the_type_says_whose_fault_it_is(status: int, openais: str, anthropics: str) -> None:
    error = ApiError(status, "m", "c", param="p")
    told = {"type": "error", "error": {"type": anthropics, "message": "m"}, "request_id": None}
    assert error.body("/v1/messages") == error.body("/v1/messages/count_tokens") == told
    for path in ("/v1/messagess", "/v1/responses", "/v1/models"):
        assert error.body(path) == error.body()
    assert error.body()["error"]["type"] == openais


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


# --- From engines --------------------------------------------------------------------------------


def test_a_rewritten_body_is_explained_without_what_is_for_programmers() -> None:
    # How Pydantic prints its errors; each has the beginning of what the client sent.
    error = from_engine(
        400,
        vllm(
            "3 validation errors for ValidatorIterator\n"
            "0.ChatCompletionContentPartTextParam.text\n"
            "  Field required [type=missing, input_value={'diary': 5}, input_type=dict]\n"
            "    For further information visit https://errors.pydantic.dev/2.14/v/missing\n"
            "0.ChatCompletionContentPartTextParam.type\n"
            "  Input should be 'text' [type=literal_error, input_value='diary', input_type=str]\n"
            "    For further information visit https://errors.pydantic.dev/2.14/v/literal_error\n"
            "0.ChatCompletionContentPartImageParam.image_url.url\n"
            "  Input should be a valid string [type=string_type, input_value=5, input_type=int]\n"
            "    For further information visit https://errors.pydantic.dev/2.14/v/string_type"
        ),
    )
    assert error.body()["error"] == {
        "message": "image_url.url: must be a string",
        "type": "invalid_request_error",
        "param": "image_url.url",
        "code": None,
    }


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (
            "temperature must be non-negative, got -1.0. (parameter=temperature, value=-1.0)",
            "temperature must be non-negative, got -1.0.",
        ),
        (
            "You must use one kind of structured outputs constraint but none are specified: "
            "{'json': None, 'regex': None, '_backend': None}",
            "You must use one kind of structured outputs constraint but none are specified",
        ),
        ("<path> is not a multimodal model", "this model reads text only"),
        (
            "jinja2.environment.Template.render() got multiple values for keyword argument 'm'",
            "che",
        ),
    ],
)
def test_nothing_is_said_of_classes_and_pythons_types(message: str, said: str) -> None:
    error = from_engine(400, vllm(message))
    assert said in error.message
    assert not any(
        re.search(rf"\b{word}\b", error.message)
        for word in ("parameter", "None", "path", "int", "jinja2")
    )


@pytest.mark.parametrize(
    ("path", "said"),
    [(CHAT, "stop cannot contain"), (MESSAGES, "stop_sequences cannot contain")],
)
def test_a_field_is_named_as_its_api_names_it(path: str, said: str) -> None:
    error = from_engine(400, vllm("stop cannot contain an empty string."))
    assert error.body(path)["error"]["message"] == f"{said} an empty string."


def test_an_unknown_model() -> None:
    error = from_engine(404, vllm("The model `gpt-9` does not exist.", "model", 404))
    assert (error.status, error.code) == (404, "model_not_found")
    assert "gpt-9" in error.message


@pytest.mark.parametrize("status", [500, 501, 502, 503])
def test_an_engines_own_failure_is_not_passed_on(status: int) -> None:
    error = from_engine(status, vllm(TRACEBACK, "secret_param"))
    assert error.status == status
    assert error.code == "engine_error"
    told = json.dumps(error.body())
    assert "Traceback" not in told
    assert "KeyError" not in told
    assert "secret_param" not in told


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


# Of another shape than vLLM's.
ODD: list[Any] = [
    *(None, [], ["message"], "Bad Request", 7, {}, {"detail": "Not Found"}),
    {"detail": [{"loc": ["body"], "msg": "field required"}]},
    *({"error": None}, {"error": "text"}),
    *({"error": {"message": None}}, {"error": {"message": {"nested": 1}}}),
]


@given(st.integers(100, 599) | st.sampled_from([400, 404, 500]), st.sampled_from(ODD) | JSON)
@example(200, vllm("message"))
@example(204, None)
@example(400, {"message": ""})
def test_any_answer_becomes_an_error_that_can_be_sent(status: int, body: Any) -> None:
    error = from_engine(status, body)
    # A failure is never told as a success.
    assert error.status == (status if status >= 400 else 502)
    assert error.code == ("engine_error" if error.status >= 500 else None)
    sent = error.body()["error"]
    assert set(sent) == {"message", "type", "param", "code"}
    assert isinstance(sent["message"], str)
    assert sent["message"]
    assert sent["param"] is None or isinstance(sent["param"], str)
    json.dumps(sent)


# --- What does not fit ---------------------------------------------------------------------------

# vLLM 0.32's wordings of a prompt of 9,000 or 8,192 tokens and a context of 8,192, as its modules
# print them, and `deployments.engine.refusals`'.
TOO_LONG = {
    "deployments/engine/refusals.py": (
        "This model's maximum context length is 8192 tokens. However, you requested 16 output "
        "tokens and your prompt contains 9000 input tokens."
    ),
    "renderers/params.py, tokens": (
        "This model's maximum context length is 8192 tokens. However, your prompt contains at "
        "least 9000 input tokens, which exceeds this limit even without any output tokens. Please "
        "reduce the length of the input prompt."
    ),
    "entrypoints/serve/utils/api_utils.py": (
        "Input length (9000) exceeds model's maximum context length (8192)."
    ),
    "v1/engine/input_processor.py": (
        "The decoder prompt (length 9000) is longer than the maximum model length of 8192. Make "
        "sure that `max_model_len` is no smaller than the number of text tokens."
    ),
    "entrypoints/openai/responses/serving.py": (
        "The engine prompt length 9000 exceeds the max_model_len 8192. Please reduce prompt."
    ),
}
NO_ROOM_LEFT = (
    "The decoder prompt (length 8192) plus the number of requested output tokens (at least 1) is "
    "longer than the maximum model length of 8192. Make sure that `max_model_len` is no smaller "
    "than the number of text tokens (prompt + requested output tokens)."
)
IN_CHARACTERS = (
    "This model's maximum context length is 8192 tokens. However, your prompt contains 99999 "
    "characters (more than 81920 characters, which is the upper bound for 8192 input tokens). "
    "Please reduce the length of the input prompt."
)


@pytest.mark.parametrize("message", TOO_LONG.values(), ids=TOO_LONG.keys())
@pytest.mark.parametrize(
    ("path", "field"), [(CHAT, "messages"), (COMPLETIONS, "prompt"), (RESPONSES, "input")]
)
def test_a_prompt_over_the_context_is_told_in_openais_words(
    message: str, path: str, field: str
) -> None:
    assert from_engine(400, vllm(message, "input_tokens")).body(path)["error"] == {
        "message": "This model's maximum context length is 8192 tokens. However, your "
        f"{field} resulted in 9000 tokens. Please reduce the length of the {field}.",
        "type": "invalid_request_error",
        "param": field,
        "code": "context_length_exceeded",
    }


@pytest.mark.parametrize("path", [MESSAGES, COUNT_TOKENS])
@pytest.mark.parametrize(
    ("message", "said"),
    [
        *((one, "prompt is too long: 9000 tokens > 8192 maximum") for one in TOO_LONG.values()),
        (NO_ROOM_LEFT, "prompt is too long: 8192 tokens > 8191 maximum"),
        (IN_CHARACTERS, "prompt is too long: 99999 characters > 8192 tokens maximum"),
    ],
)
def test_a_prompt_over_the_context_is_told_in_anthropics_words(
    path: str, message: str, said: str
) -> None:
    error = from_engine(400, vllm(message)).body(path)["error"]
    assert error == {"type": "invalid_request_error", "message": said}


# What agents look for to compact their history, in any API's errors.
COMPACTS = (
    "prompt is too long", "context length", "context window", "context limit", "maximum context",
    "context_length", "too many tokens", "reduce the length", "exceeds the limit", "context size",
)  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
@pytest.mark.parametrize(("prompt", "left"), [(9009, 7375), (12, 16372)])
def test_an_output_cap_that_is_too_large_is_no_prompt_that_is_too_long(
    path: str, field: str, prompt: int, left: int
) -> None:
    message = (
        "This model's maximum context length is 16384 tokens. However, you requested 32000 output "
        f"tokens and your prompt contains {prompt} input tokens. (parameter={field})"
    )
    error = from_engine(400, vllm(message, field)).body(path)["error"]
    assert error["param"] == field
    assert error["code"] == "invalid_value"
    assert all(str(number) in error["message"] for number in (32000, left, prompt))
    assert not any(words in json.dumps(error).lower() for words in COMPACTS)


@pytest.mark.parametrize(
    ("prompt", "output", "said"),
    [
        (
            9009,
            9000,
            "input length and `max_tokens` exceed context limit: 9009 + 9000 > 16384, decrease "
            "input length or `max_tokens` and try again",
        ),
        (12, 32000, "max_tokens: 32000 > 16384, which is the maximum allowed number of output"),
        (None, 32000, "max_tokens: 32000 > 16384, which is the maximum allowed number of output"),
    ],
)
def test_claude_code_is_told_what_to_ask_for_less_of(
    prompt: int | None, output: int, said: str
) -> None:
    error = OutputTooLong(output, 16384, prompt, "max_completion_tokens").body(MESSAGES)["error"]
    assert error["message"].startswith(said)
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
def test_a_cap_over_the_context_before_the_prompt_is_known(field: str) -> None:
    error = from_engine(
        400,
        vllm(
            f"{field}=32000 cannot be greater than max_model_len=16384. Please "
            "request fewer output tokens."
        ),
    )
    assert (error.code, error.param) == ("invalid_value", field)
    assert error.message == (
        f"{field} is too large: 32000. This model supports at most 16384 output tokens; ask for no "
        "more."
    )


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
