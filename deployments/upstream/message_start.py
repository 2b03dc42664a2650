"""Has a stream of vLLM's Messages API tell of caches in its first event, as in its last.

vLLM 0.32 knows these numbers when it makes the first event, and there counts the whole prompt as
computed. Clients take a turn's cost from that event.
"""

import functools
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from deployments.upstream.patch import Patch

_DATA = "data: "


def apply() -> None:
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
    from vllm.entrypoints.openai.chat_completion.serving import _make_prompt_tokens_details

    stream = AnthropicServingMessages.chat_completion_stream_generator

    @functools.wraps(stream)
    async def told(
        handler: Any, request: Any, outputs: Any, *given: Any, **more: Any
    ) -> AsyncIterator[str]:
        first: Any = None

        async def noted() -> AsyncIterator[Any]:
            nonlocal first
            async with aclosing(outputs):
                async for output in outputs:
                    first = first or output
                    yield output

        begun = False
        async with aclosing(stream(handler, request, noted(), *given, **more)) as chunks:
            async for chunk in chunks:
                if not begun and first is not None:
                    # Of these details vLLM makes the first event's usage.
                    details = _make_prompt_tokens_details(
                        handler.enable_prompt_tokens_details,
                        first.num_cached_tokens,
                        first.num_cache_creation_tokens,
                        None,
                    )
                    chunk = _with(chunk, details)
                begun = True
                yield chunk

    AnthropicServingMessages.chat_completion_stream_generator = told


def _with(chunk: str, details: Any) -> str:
    data = json.loads(chunk.removeprefix(_DATA))
    # An error has no usage.
    if details is None or "usage" not in data:
        return chunk
    data["usage"]["prompt_tokens_details"] = details.model_dump()
    return f"{_DATA}{json.dumps(data)}\n\n"


PATCH = Patch(
    name="message_start",
    seams=(
        "vllm.entrypoints.anthropic.serving:"
        "AnthropicServingMessages.chat_completion_stream_generator",
        "vllm.entrypoints.openai.chat_completion.serving:_make_prompt_tokens_details",
    ),
    why="a stream's first event counts the whole prompt as computed, its last one does not",
    upstream="vllm-project/vllm#45079 (#40912 did the last event)",
    process="server",
)
