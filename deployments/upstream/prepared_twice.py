"""Has each engine prepare an image once: a turn takes what its check has prepared.

vLLM prepares media (it resizes and cuts images, and counts their tokens) in an engine's server.
Checks use a cache of their own, since half of the other one is in the engine's core.
"""

from typing import Any

from deployments.upstream.patch import Patch, of


def prepare_once(renderer: Any) -> None:
    """Change an engine's ``BaseRenderer``; nothing changes for a model that reads text only.

    One thread of the renderer uses both caches.
    """
    sent, checked = renderer._mm_processor_cache, renderer._mm_processor_only_cache
    if sent is None or checked is None:
        return
    is_sent, get = sent.is_cached_item, sent.get_and_update_item
    touch = sent.touch_sender_cache_item

    def taken(mm_item: Any, mm_hash: str) -> Any:
        if mm_item is None and not is_sent(mm_hash):
            mm_item = checked.get_and_update_item(None, mm_hash)
        return get(mm_item, mm_hash)

    def touched(mm_hash: str) -> None:
        if is_sent(mm_hash):
            touch(mm_hash)
        if checked.is_cached_item(mm_hash):
            checked.touch_sender_cache_item(mm_hash)

    sent.is_cached_item = lambda mm_hash: is_sent(mm_hash) or checked.is_cached_item(mm_hash)
    sent.get_and_update_item, sent.touch_sender_cache_item = taken, touched


PATCH = Patch(
    name="prepared_twice",
    seams=(
        *of("vllm.renderers.base:BaseRenderer", "_mm_processor_cache _mm_processor_only_cache"),
        *of(
            "vllm.multimodal.cache:BaseMultiModalProcessorCache",
            "is_cached_item get_and_update_item touch_sender_cache_item",
        ),
    ),
    why="a turn with large images waits for them to be prepared a second time",
    upstream="not reported: let the sender cache take items that the processor-only cache has",
    process="server",
)
