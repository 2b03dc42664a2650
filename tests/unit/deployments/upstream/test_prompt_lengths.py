"""Lengths of prompts and outputs, as vLLM judges them; `test_refusals` asks its whole server."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.entrypoints.serve.utils.api_utils import get_max_tokens
from vllm.exceptions import VLLMValidationError
from vllm.renderers import TokenizeParams

CONTEXT = 100
TOKENIZER: Any = SimpleNamespace(max_chars_per_token=4, truncation_side="right")


def params(output: int) -> TokenizeParams:
    return TokenizeParams(
        max_total_tokens=CONTEXT,
        max_output_tokens=output,
        max_output_tokens_param="max_tokens",
        max_total_tokens_param="max_model_len",
    )


def told(prompt: int, output: int) -> str | None:
    """Why a prompt is refused that has so many tokens."""
    try:
        judged = params(output)
        # As tokenizers do.
        most = judged.get_encode_kwargs()["max_length"]
        judged._token_len_check(TOKENIZER, [1] * min(prompt, most or prompt))
    except VLLMValidationError as error:
        return str(error)
    return None


def test_vllm_does_not_know_how_long_a_prompt_is() -> None:
    said = told(5000, 10)
    assert said is not None
    assert "at least 101 input tokens" in said
    # It is the prompt that is too long.
    said = told(5000, 500)
    assert said is not None
    assert "max_tokens=500 cannot be greater" in said


def test_vllm_gives_less_output_than_was_asked_for_and_none_behind_a_full_context() -> None:
    assert told(60, 60) is None
    assert told(CONTEXT, 10) is None
    left = get_max_tokens(CONTEXT, 10, CONTEXT, {})
    with pytest.raises(VLLMValidationError, match="max_tokens must be at least 1, got 0"):
        SamplingParams(max_tokens=left)


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize(
    ("prompt", "output", "says"),
    [
        (5000, 10, "requested 10 output tokens and your prompt contains 5000 input tokens"),
        (5000, 500, "requested 500 output tokens and your prompt contains 5000 input tokens"),
        (60, 60, "requested 60 output tokens and your prompt contains 60 input tokens"),
        (CONTEXT, 0, "requested 1 output tokens and your prompt contains 100 input tokens"),
        (60, 40, None),
        (CONTEXT - 1, 0, None),
    ],
)
def test_the_whole_prompt_and_the_output_are_judged(
    prompt: int, output: int, says: str | None
) -> None:
    said = told(prompt, output)
    assert (said is None) if says is None else (said is not None and says in said)
