"""Has each engine prepare an image once: a turn takes what its check has prepared.

vLLM prepares media (it resizes and cuts images, and counts their tokens) in an engine's server.
Checks use a cache of their own, since half of the other one is in the engine's core.
"""

from typing import Any

from deployments.upstream.patch import Patch


def prepare_once(renderer: Any) -> None:
    """Change an engine's ``BaseRenderer``; nothing changes for a model that reads text only."""
    sent, checked = renderer._mm_processor_cache, renderer._mm_processor_only_cache
    if sent is not None and checked is not None:
        renderer._mm_processor_cache = both_of(sent, checked)


def both_of(sent: Any, checked: Any) -> Any:
    """Return the cache of what the core has, and behind it that of what checks have prepared.

    One thread of the renderer uses both.
    """
    from vllm.multimodal.cache import BaseMultiModalProcessorCache

    class Prepared(BaseMultiModalProcessorCache):  # type: ignore[misc]  # To mypy it is Any.
        def is_cached_item(self, mm_hash: str) -> bool:
            return bool(sent.is_cached_item(mm_hash) or checked.is_cached_item(mm_hash))

        def get_and_update_item(self, mm_item: Any, mm_hash: str) -> Any:
            if mm_item is None and not sent.is_cached_item(mm_hash):
                mm_item = checked.get_and_update_item(None, mm_hash)
            return sent.get_and_update_item(mm_item, mm_hash)

        def touch_sender_cache_item(self, mm_hash: str) -> None:
            for cache in (sent, checked):
                if cache.is_cached_item(mm_hash):
                    cache.touch_sender_cache_item(mm_hash)

        def release_sender_touches(self) -> None:
            for cache in (sent, checked):
                cache.release_sender_touches()

        def validate_input_item(self, mm_item: Any, mm_hash: str) -> None:
            sent.validate_input_item(mm_item, mm_hash)

        def invalidate(self, mm_hash: str) -> None:
            sent.invalidate(mm_hash)

        def clear_cache(self) -> None:
            sent.clear_cache()

        def make_stats(self, *, delta: bool = False) -> Any:
            return sent.make_stats(delta=delta)

        def close(self) -> None:
            sent.close()

    return Prepared()


_CACHE = "vllm.multimodal.cache:BaseMultiModalProcessorCache"

PATCH = Patch(
    name="prepared_twice",
    package="vllm",
    versions="==0.32.*",
    seams=(
        "vllm.renderers.base:BaseRenderer._mm_processor_cache",
        "vllm.renderers.base:BaseRenderer._mm_processor_only_cache",
        f"{_CACHE}.is_cached_item(self, mm_hash)",
        f"{_CACHE}.get_and_update_item(self, mm_item, mm_hash)",
        f"{_CACHE}.touch_sender_cache_item(self, mm_hash)",
        f"{_CACHE}.release_sender_touches(self)",
        f"{_CACHE}.validate_input_item(self, mm_item, mm_hash)",
        f"{_CACHE}.invalidate(self, mm_hash)",
        f"{_CACHE}.make_stats(self, *, delta)",
    ),
    why="a turn with large images waits for them to be prepared a second time",
    upstream=(
        "not reported: /tokenize or /render followed by the request itself prepares each image "
        "twice; let the sender cache take an item that the processor-only cache already has"
    ),
    process="server",
    used_by="deployments/engine/http_server.py",
)
