"""Has vLLM know media by the names that routers have given them, whichever API they came by.

vLLM keeps what it makes of an image under its name: processed pixels, embeddings, KV. Routers write
the name into the URL (`conserve.media.Medium`), since vLLM 0.29 drops the ``uuid`` of images in
Messages.

Internals of vLLM 0.29 that are used: the ``parse_...`` methods of ``AsyncMultiModalContentParser``.
"""

import functools
from collections.abc import Callable
from typing import Any

from vllm.renderers.chat_utils import AsyncMultiModalContentParser

from conserve.media import name_of


def keep_media_names(renamed: Callable[[str], str] = lambda name: name) -> None:
    """Change vLLM's parser; raises AttributeError if it is another one.

    ``renamed`` returns the engine's own name for one of a router's.
    """
    for method in ("parse_image", "parse_audio", "parse_video"):
        parse = getattr(AsyncMultiModalContentParser, method)
        parse = getattr(parse, "__wrapped__", parse)
        setattr(AsyncMultiModalContentParser, method, _named(parse, renamed))


def _named(parse: Callable[..., Any], renamed: Callable[[str], str]) -> Callable[..., Any]:
    @functools.wraps(parse)
    def named(parser: Any, url: Any, uuid: str | None = None) -> None:
        name = name_of(url) if isinstance(url, str) else None
        parse(parser, url, uuid if name is None else renamed(name))

    return named
