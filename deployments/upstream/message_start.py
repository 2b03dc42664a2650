"""Has a stream of vLLM's Messages API tell of caches in its first event, as in its last.

vLLM 0.32 knows these numbers when it makes the first event, and there counts the whole prompt as
computed. Clients take a turn's cost from that event.
"""

import functools
import json
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from deployments.upstream.patch import Patch

_DATA = "data: "


def apply() -> None:
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages as Messages

    Messages.chat_completion_stream_generator = _telling(Messages.chat_completion_stream_generator)


def _telling(stream: Callable[..., AsyncIterator[str]]) -> Callable[..., AsyncIterator[str]]:
    from vllm.entrypoints.openai.chat_completion.serving import _make_prompt_tokens_details

    @functools.wraps(stream)
    async def told(
        handler: Any, request: Any, outputs: Any, *given: Any, **more: Any
    ) -> AsyncIterator[str]:
        first: Any = None

        async def noted() -> AsyncIterator[Any]:
            nonlocal first
            async with aclosing(outputs):
                async for output in outputs:
                    first = output if first is None else first
                    yield output

        def begun(chunk: str) -> str:
            if first is None:
                return chunk
            data = json.loads(chunk.removeprefix(_DATA))
            enabled = handler.enable_prompt_tokens_details
            found, created = first.num_cached_tokens, first.num_cache_creation_tokens
            details = _make_prompt_tokens_details(enabled, found, created, None)
            if details is None or "usage" not in data:
                return chunk
            # Of these vLLM makes the event's usage.
            data["usage"]["prompt_tokens_details"] = details.model_dump()
            return f"{_DATA}{json.dumps(data)}\n\n"

        async with aclosing(stream(handler, request, noted(), *given, **more)) as chunks:
            begins = True
            async for chunk in chunks:
                yield begun(chunk) if begins else chunk
                begins = False

    return told


PATCH = Patch(
    name="message_start",
    package="vllm",
    versions="==0.32.*",
    seams=(
        "vllm.entrypoints.anthropic.serving:AnthropicServingMessages"
        ".chat_completion_stream_generator(self, request, result_generator, request_id, "
        "model_name, conversation, tokenizer, request_metadata, chat_template_kwargs, "
        "mm_token_counts)",
        "vllm.entrypoints.openai.chat_completion.serving:_make_prompt_tokens_details"
        "(enable_prompt_tokens_details, num_cached_tokens, num_cache_creation_tokens, "
        "mm_token_counts)",
    ),
    why="a stream's first event counts the whole prompt as computed, its last one does not",
    upstream="vllm-project/vllm#45079 (#40912 did the last event)",
    process="server",
    apply=apply,
)
