"""Messages between processes on a prompt's KV."""

from conserve import wire
from conserve.wire import CachedTokens


def test_an_engines_answer_says_where_its_prompt_was_found() -> None:
    """In the words of LMCacheMPConnector 0.5.6; what it counts twice is left out."""
    stats = {
        "num_vllm_cached_tokens": 128,
        "num_lmcache_cached_tokens": 640,
        "num_lmcache_extra_cached_tokens": 512,
    }
    assert wire.cached_tokens({"cached_token_stats": stats}) == CachedTokens(128, 512)


def test_an_engine_that_says_nothing_is_not_taken_for_one_that_found_nothing() -> None:
    for params in (None, {}, {"cached_token_stats": None}):
        assert wire.cached_tokens(params) == CachedTokens(None, None)
    some = {"cached_token_stats": {"num_vllm_cached_tokens": 0}}
    assert wire.cached_tokens(some) == CachedTokens(0, None)


def test_a_request_asks_for_it_and_says_what_lmcache_may_hold() -> None:
    assert wire.transfer_params(900) == {
        "cached_token_stats": True,
        "conserve.stored_tokens": 900,
    }
    assert wire.transfer_params() == {"cached_token_stats": True}


def test_what_was_to_be_there_and_was_not_is_said() -> None:
    stats = {"num_vllm_cached_tokens": 0, "num_lmcache_extra_cached_tokens": 128}
    said = {"cached_token_stats": {**stats, wire.MISSED: 256, wire.LATE: True}}
    assert wire.cached_tokens(said) == CachedTokens(0, 128, missed_tokens=256, late=True)
    assert wire.transfer_params(prefilled=True)[wire.PREFILLED] is True
