"""Has vLLM say how long a prompt is that it refuses, and refuse output that does not fit behind it.

vLLM 0.32 tokenizes no further than the context's end. It cuts the output asked for to what fits,
and refuses a prompt that fills the context exactly for a ``max_tokens`` of 0.
"""

import functools
from contextvars import ContextVar
from typing import Any

from deployments.upstream.patch import Patch, of

# Set by the server for each request: whether it asks only how many tokens it has, so that nothing
# comes to the engine's core; and whether it may get less output than it asks for.
counting: ContextVar[bool] = ContextVar("conserve_counting", default=False)
takes_room_left: ContextVar[bool] = ContextVar("conserve_room_left", default=False)


def apply() -> None:
    from vllm.renderers import TokenizeParams

    judge_fields, encode_options = TokenizeParams.__post_init__, TokenizeParams.get_encode_kwargs

    @functools.wraps(judge_fields)
    def judged(self: Any) -> None:
        # Only where a prompt is cut to what its output leaves does the output have to leave some.
        if self.truncate_prompt_tokens is not None or self.truncation_side is not None:
            judge_fields(self)

    @functools.wraps(encode_options)
    def whole(self: Any) -> dict[str, Any]:
        options: dict[str, Any] = encode_options(self)
        if self.truncate_prompt_tokens is None:
            options |= {"truncation": False, "max_length": None}
        return options

    TokenizeParams.__post_init__ = judged
    TokenizeParams.get_encode_kwargs = whole
    TokenizeParams._token_len_check = _judge_tokens
    TokenizeParams.max_truncation_tokens = property(_longest_cut)


def _longest_cut(self: Any) -> int | None:
    most = self.max_total_tokens
    # An answer has a token if its request says nothing of it.
    return None if most is None else max(0, most - max(1, self.max_output_tokens))


def _judge_tokens(self: Any, tokenizer: Any, tokens: Any) -> Any:
    from vllm.exceptions import VLLMValidationError

    most, longest, prompt = self.max_total_tokens, _longest_cut(self), len(tokens)
    if longest is None or prompt <= longest or counting.get():
        return tokens
    if prompt < most and takes_room_left.get():
        return tokens
    raise VLLMValidationError(
        f"This model's maximum context length is {most} tokens. However, you requested "
        f"{max(1, self.max_output_tokens)} output tokens and your prompt contains {prompt} input "
        "tokens.",
        parameter=self.max_output_tokens_param,
    )


PATCH = Patch(
    name="prompt_lengths",
    seams=of(
        "vllm.renderers.params:TokenizeParams",
        "__post_init__ get_encode_kwargs _token_len_check max_truncation_tokens",
    ),
    why="clients that compact a history are not told how long it is, or get hardly any output",
    upstream="not reported: _token_len_check could refuse, and name the length (near: vllm#42474)",
    process="server",
)
