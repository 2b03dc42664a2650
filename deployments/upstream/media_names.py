"""Has vLLM know media by the names that routers have given them, whichever API they came by.

vLLM keeps what it makes of an image under its name: processed pixels, embeddings, KV. Routers write
the name into the URL (`conserve.media.Medium`), since vLLM 0.32 drops the ``uuid`` of images in
Messages and Responses.
"""

import functools
from collections.abc import Callable
from typing import Any

from conserve.media import name_of
from deployments.upstream.patch import Patch, of

_METHODS = ("parse_image", "parse_audio", "parse_video")


def keep_media_names(renamed: Callable[[str], str]) -> None:
    """Change vLLM's parser; ``renamed`` returns the engine's own name for one of a router's."""
    from vllm.renderers.chat_utils import AsyncMultiModalContentParser as Parser

    for method in _METHODS:
        setattr(Parser, method, _named(getattr(Parser, method), renamed))


def _named(parse: Callable[..., Any], renamed: Callable[[str], str]) -> Callable[..., Any]:
    @functools.wraps(parse)
    def named(parser: Any, url: Any, uuid: str | None = None) -> None:
        name = name_of(url) if isinstance(url, str) else None
        parse(parser, url, uuid if name is None else renamed(name))

    return named


PATCH = Patch(
    name="media_names",
    seams=of("vllm.renderers.chat_utils:AsyncMultiModalContentParser", " ".join(_METHODS)),
    why="each turn decodes and hashes its history's images, which the node's cache does not know",
    upstream="not reported: Messages and Responses ignore an image's uuid, unlike Chat Completions",
    process="server",
)
