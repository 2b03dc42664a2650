"""Explains refused requests better than vLLM does.

vLLM 0.29 cuts a prompt's tokens where the output asked for would have no more room. So it does not
know how long the prompt is, and says the same of a prompt and of an output that is too long. Here
the whole prompt is tokenized, as vLLM's tokenizers do before they cut it. Of a body that cannot be
read, `conserve.complaints` chooses the one error that counts.

Internals of vLLM 0.29 that are used: ``TokenizeParams`` of ``vllm.renderers.params``.
"""

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.responses import JSONResponse, Response
from vllm.entrypoints.serve import create_error_response
from vllm.exceptions import VLLMValidationError
from vllm.renderers import TokenizeParams

from conserve.complaints import complaint
from deployments.engine.check import only_counts, takes_what_room_is_left


def explain_refusals(app: FastAPI) -> None:
    """Have vLLM's HTTP app, which serves nothing yet, say what is wrong with requests."""
    app.exception_handler(RequestValidationError)(_invalid)
    app.exception_handler(ValidationError)(_invalid)
    # vLLM has built it without these handlers; it is built anew when it is needed.
    app.middleware_stack = None
    judge_whole_prompts()


async def _invalid(request: Request, error: Exception) -> Response:
    if isinstance(error, RequestValidationError):
        errors, body = error.errors(), error.body
    else:
        # Parts of messages are judged only when the template reads them.
        assert isinstance(error, ValidationError)
        errors, body = error.errors(), await request.json()
    if isinstance(errors[0], str):
        # The body has another content type, as vLLM says.
        field, message = "", errors[0]
    else:
        field, message = complaint(errors, body)
    if field and not message.startswith(field):
        message = f"{field}: {message}"
    refusal = create_error_response(message, param=field or None)
    return JSONResponse(refusal.model_dump(), refusal.error.code)


def judge_whole_prompts() -> None:
    """Have this process's vLLM say how long prompts are that it refuses.

    Raises `RuntimeError` if vLLM judges lengths in another way than this expects.
    """
    for name in _OWN:
        if not hasattr(TokenizeParams, name):
            raise RuntimeError(
                f"vLLM's TokenizeParams has no {name}; install the version that ConServe names"
            )
    for name, method in _OWN.items():
        setattr(TokenizeParams, name, method)


_post_init: Callable[..., None] = TokenizeParams.__post_init__
_get_encode_kwargs: Callable[..., dict[str, Any]] = TokenizeParams.get_encode_kwargs
_text_len_check: Callable[..., str] = TokenizeParams._text_len_check


def _judge_fields(params: Any) -> None:
    # Only where prompts are cut to what the output leaves does the output have to leave something.
    if params.truncate_prompt_tokens is not None or params.truncation_side is not None:
        _post_init(params)


def _encode_all(params: Any) -> dict[str, Any]:
    if params.truncate_prompt_tokens is not None:
        return _get_encode_kwargs(params)
    return {
        "truncation": False,
        "max_length": None,
        "add_special_tokens": params.add_special_tokens,
    }


def _judge_text(params: Any, tokenizer: Any, text: str) -> str:
    """Refuse to tokenize a text that is too long even if each token were the longest there is."""
    if params.truncate_prompt_tokens is not None:
        return _text_len_check(params, tokenizer, text)
    most = params.max_total_tokens
    if most is None or tokenizer is None:
        return text
    if len(text) > most * tokenizer.max_chars_per_token:
        raise VLLMValidationError(
            f"This model's maximum context length is {most} tokens. However, your prompt contains "
            f"{len(text)} characters.",
            parameter="input_text",
        )
    return text


def _longest_cut(params: Any) -> int | None:
    """Return how long a prompt is cut to; vLLM 0.32 leaves room for one token of output."""
    most = params.max_total_tokens
    return None if most is None else max(0, most - params.max_output_tokens)


def _judge_tokens(params: Any, tokenizer: Any, tokens: Any) -> Any:
    most, output = params.max_total_tokens, params.max_output_tokens
    prompt = len(tokens)
    if most is None or prompt + output <= most or only_counts():
        return tokens
    if prompt < most and takes_what_room_is_left():
        return tokens
    raise VLLMValidationError(
        f"This model's maximum context length is {most} tokens. However, you requested {output} "
        f"output tokens and your prompt contains {prompt} input tokens.",
        parameter=params.max_output_tokens_param,
    )


_OWN = {
    "__post_init__": _judge_fields,
    "get_encode_kwargs": _encode_all,
    "_text_len_check": _judge_text,
    "_token_len_check": _judge_tokens,
    "max_truncation_tokens": property(_longest_cut),
}
