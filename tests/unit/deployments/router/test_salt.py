"""The salt under which engines keep a prompt's KV, if it is a client's own."""

import pytest
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.exceptions import VLLMValidationError


@pytest.mark.parametrize("salt", ["a/b", "a@b", "a\\b", "a\0b", "x" * 129])
def test_vllm_refuses_a_salt_that_would_end_an_engine(salt: str) -> None:
    """LMCache's key refuses it, in vLLM's scheduler."""
    with pytest.raises(ValueError, match="cache_salt"):
        IPCCacheServerKey("m", 1, None, (), 0, 0, "r", salt)
    for request, prompt in (
        (ChatCompletionRequest, {"messages": [{"role": "user", "content": "x"}]}),
        (CompletionRequest, {"prompt": "x"}),
        (ResponsesRequest, {"input": "x"}),
    ):
        with pytest.raises(VLLMValidationError, match="cache_salt"):
            request.model_validate({**prompt, "cache_salt": salt})
