"""What vLLM knows an image by that came in a message."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.renderers.chat_utils import AsyncMultiModalContentParser

from conserve.media import Medium
from deployments.upstream.media_names import keep_media_names

URL = Medium("f00", "image/png", "AAAA").url


async def name_in_a_message(url: str) -> Any:
    """Of an image to which its client has given the name ``own``."""
    image = {"type": "image", "uuid": "own", "source": {"type": "url", "url": url}}
    asked = AnthropicMessagesRequest(
        model="m", max_tokens=9, messages=[{"role": "user", "content": [image]}]
    )
    chat = AnthropicServingMessages.to_chat_completion_request(asked)
    (part,) = chat.messages[0]["content"]
    found: list[Any] = []
    tracker = SimpleNamespace(add=lambda kind, load: found.append(load) or "<image>")
    parser: Any = AsyncMultiModalContentParser(tracker)  # type: ignore[arg-type]
    parser._connector = SimpleNamespace(fetch_image_async=lambda _: asyncio.sleep(0))
    parser.parse_image(part["image_url"]["url"], part.get("uuid"))
    return (await found[0]())[1]


async def test_vllm_forgets_the_name_of_an_image_in_a_message() -> None:
    assert await name_in_a_message(URL) is None


@pytest.mark.parametrize(("url", "name"), [(URL, "f00-2"), ("data:image/png;base64,AAAA", None)])
async def test_an_image_has_the_name_that_its_router_has_given_it(
    url: str, name: str | None
) -> None:
    keep_media_names(lambda name: f"{name}-2")
    assert await name_in_a_message(url) == name
