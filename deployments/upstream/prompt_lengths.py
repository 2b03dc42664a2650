"""Has vLLM say how long a prompt is that it refuses, and refuse output that does not fit behind it.

vLLM 0.32 stops to tokenize behind the context's end, and says "at least" so many tokens. It gives a
request that asks for more output than fits less of it, unseen, and refuses a prompt that fills the
context exactly for a ``max_tokens`` of 0. Here the whole prompt is tokenized, as vLLM's tokenizers
do before they cut it.
"""

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from deployments.upstream.patch import Patch

# Set by the server for each request: whether it asks only how many tokens it has, so that nothing
# comes to the engine's core; and whether it may get less output than it asks for.
counting: ContextVar[bool] = ContextVar("conserve_counting", default=False)
takes_room_left: ContextVar[bool] = ContextVar("conserve_room_left", default=False)


def apply() -> None:
    from vllm.renderers import TokenizeParams as Params

    Params.__post_init__ = _judging_fields(Params.__post_init__)
    Params.get_encode_kwargs = _unless_cut(Params.get_encode_kwargs, _encode_all)
    Params._text_len_check = _unless_cut(Params._text_len_check, _judge_text)
    Params._token_len_check = _judge_tokens
    Params.max_truncation_tokens = property(_longest_cut)


def _judging_fields(judge: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(judge)
    def judged(params: Any) -> None:
        # Only where prompts are cut to what the output leaves does the output have to leave some.
        if params.truncate_prompt_tokens is not None or params.truncation_side is not None:
            judge(params)

    return judged


def _unless_cut(theirs: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def judged(params: Any, *given: Any) -> Any:
        return (own if params.truncate_prompt_tokens is None else theirs)(params, *given)

    return judged


def _encode_all(params: Any) -> dict[str, Any]:
    return {
        "truncation": False,
        "max_length": None,
        "add_special_tokens": params.add_special_tokens,
    }


def _judge_text(params: Any, tokenizer: Any, text: str) -> str:
    """Refuse to tokenize a text that is too long even if each token were the longest there is."""
    most = params.max_total_tokens
    if most is None or tokenizer is None or len(text) <= most * tokenizer.max_chars_per_token:
        return text
    raise _refusal(most, f"your prompt contains {len(text)} characters.", "input_text")


def _longest_cut(params: Any) -> int | None:
    most = params.max_total_tokens
    return None if most is None else max(0, most - _output_tokens(params))


def _judge_tokens(params: Any, tokenizer: Any, tokens: Any) -> Any:
    most, output, prompt = params.max_total_tokens, _output_tokens(params), len(tokens)
    if most is None or prompt + output <= most or counting.get():
        return tokens
    if prompt < most and takes_room_left.get():
        return tokens
    asked = f"you requested {output} output tokens and your prompt contains {prompt} input tokens."
    raise _refusal(most, asked, params.max_output_tokens_param)


def _output_tokens(params: Any) -> int:
    # An answer has a token if its request says nothing of it.
    return max(1, params.max_output_tokens)


def _refusal(most: int, why: str, parameter: str) -> Exception:
    from vllm.exceptions import VLLMValidationError

    context = f"This model's maximum context length is {most} tokens. However, {why}"
    error: Exception = VLLMValidationError(context, parameter=parameter)
    return error


_PARAMS = "vllm.renderers.params:TokenizeParams"

PATCH = Patch(
    name="prompt_lengths",
    package="vllm",
    versions="==0.32.*",
    seams=(
        f"{_PARAMS}.__post_init__(self)",
        f"{_PARAMS}.get_encode_kwargs(self)",
        f"{_PARAMS}._text_len_check(self, tokenizer, text)",
        f"{_PARAMS}._token_len_check(self, tokenizer, tokens)",
        f"{_PARAMS}.max_truncation_tokens",
        *(
            f"{_PARAMS}.{name}"
            for name in (
                "max_total_tokens", "max_output_tokens", "max_output_tokens_param",
                "truncate_prompt_tokens", "truncation_side", "add_special_tokens",
            )
        ),
    ),
    why="clients that compact a history are not told how long it is, or get hardly any output",
    upstream=(
        "not reported: a chat of exactly max_model_len tokens is answered 'max_tokens must be at "
        "least 1, got 0', so _token_len_check should refuse it; and a 400 that says 'at least N+1 "
        "input tokens' does not help clients that compact. (#42474 has vLLM cut the output.)"
    ),
    process="server",
    apply=apply,
)  # fmt: skip
