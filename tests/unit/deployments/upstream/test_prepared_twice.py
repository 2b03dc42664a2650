"""An image that a check has prepared, by vLLM's own caches of prepared media."""

from types import SimpleNamespace
from typing import Any

from vllm.multimodal.cache.base import MultiModalProcessorOnlyCache
from vllm.multimodal.cache.lru import LruKeyReplicatedSenderCache
from vllm.multimodal.inputs import MultiModalKwargsItem

from deployments.upstream.prepared_twice import prepare_once
from tests.unit.deployments.engine.vllm_server import Server

IMAGE: Any = (MultiModalKwargsItem.dummy(), [])


def renderer() -> Any:
    """One that has checked a request with an image."""
    sizes = SimpleNamespace(mm_processor_cache_gb=1)
    config: Any = SimpleNamespace(get_multimodal_config=lambda: sizes)
    checked = MultiModalProcessorOnlyCache(config)
    checked.get_and_update_item(IMAGE, "a")
    sent = LruKeyReplicatedSenderCache(config)
    return SimpleNamespace(_mm_processor_cache=sent, _mm_processor_only_cache=checked)


def test_vllm_does_not_know_what_it_has_prepared_for_a_check() -> None:
    assert not renderer()._mm_processor_cache.is_cached_item("a")


def test_a_turn_takes_what_its_check_has_prepared() -> None:
    made = renderer()
    prepare_once(made)
    cache = made._mm_processor_cache
    assert cache.is_cached(["a", "b"]) == [True, False]
    # The core has to get it once.
    assert cache.get_and_update_item(None, "a") == IMAGE
    assert cache.get_and_update_item(None, "a")[0] is None
    cache.touch_sender_cache_item("a")
    cache.release_sender_touches()
    # It has lost it.
    cache.invalidate("a")
    assert cache.get_and_update_item(None, "a") == IMAGE
    cache.clear_cache()
    assert cache.is_cached_item("a")


def test_a_model_that_reads_text_only_stays_as_it_is() -> None:
    made = Server().renderer
    assert made._mm_processor_cache is None
    prepare_once(made)
    assert made._mm_processor_cache is None
