"""Has each engine prepare an image once: a turn takes what its check has prepared.

vLLM prepares media (it resizes and cuts images, and counts their tokens) in an engine's server.
Checks use a cache of their own, since half of the other one is in the engine's core.

Internals of vLLM 0.32 that are used: ``BaseRenderer._mm_processor_cache``, and of requests that are
only read ``_mm_processor_only_cache``.
"""

from typing import Any

from vllm.multimodal.cache import BaseMultiModalProcessorCache


def prepare_once(renderer: Any) -> None:
    """Change an engine's ``BaseRenderer``; nothing changes for a model that reads text only."""
    sent, checked = renderer._mm_processor_cache, renderer._mm_processor_only_cache
    if sent is not None and checked is not None:
        renderer._mm_processor_cache = _Prepared(sent, checked)


class _Prepared(BaseMultiModalProcessorCache):  # type: ignore[misc]  # vLLM's types are not looked at.
    """The cache of what the core has, and behind it that of what checks have prepared.

    One thread of the renderer uses both.
    """

    def __init__(
        self, sent: BaseMultiModalProcessorCache, checked: BaseMultiModalProcessorCache
    ) -> None:
        super().__init__()
        self._sent = sent
        self._checked = checked

    def is_cached_item(self, mm_hash: str) -> bool:
        return bool(self._sent.is_cached_item(mm_hash) or self._checked.is_cached_item(mm_hash))

    def get_and_update_item(self, mm_item: Any, mm_hash: str) -> Any:
        if mm_item is None and not self._sent.is_cached_item(mm_hash):
            mm_item = self._checked.get_and_update_item(None, mm_hash)
        return self._sent.get_and_update_item(mm_item, mm_hash)

    def touch_sender_cache_item(self, mm_hash: str) -> None:
        for cache in (self._sent, self._checked):
            if cache.is_cached_item(mm_hash):
                cache.touch_sender_cache_item(mm_hash)

    def release_sender_touches(self) -> None:
        for cache in (self._sent, self._checked):
            cache.release_sender_touches()

    def validate_input_item(self, mm_item: Any, mm_hash: str) -> None:
        self._sent.validate_input_item(mm_item, mm_hash)

    def invalidate(self, mm_hash: str) -> None:
        self._sent.invalidate(mm_hash)

    def clear_cache(self) -> None:
        self._sent.clear_cache()

    def make_stats(self, *, delta: bool = False) -> Any:
        return self._sent.make_stats(delta=delta)

    def close(self) -> None:
        self._sent.close()
