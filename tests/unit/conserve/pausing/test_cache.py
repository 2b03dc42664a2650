"""What an engine's prefix cache still has."""

from hypothesis import given
from hypothesis import strategies as st

from conserve.pausing import EngineCache


def test_the_longest_unused_go_first_and_no_more_than_have_to() -> None:
    cache = EngineCache(1000)
    assert [cache.use(name, 300) for name in "abc"] == [[], [], []]
    assert cache.use("a", 350) == []
    assert list(cache) == ["b", "c", "a"]
    assert cache.use("d", 100) == ["b"]
    assert "b" not in cache
    assert cache.use("e", 900) == ["c", "a"]


def test_a_history_stays_even_if_it_is_longer_than_all() -> None:
    cache = EngineCache(100)
    cache.use("a", 50)
    assert cache.use("b", 500) == ["a"]
    assert list(cache) == ["b"]
    cache.drop("b")
    assert cache.use("c", 100) == []
    cache.drop("nobody")


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 400)), max_size=80))
def test_it_keeps_the_newest_that_fit(uses: list[tuple[str, int]]) -> None:
    cache = EngineCache(1000)
    for name, tokens in uses:
        cache.use(name, tokens)
    newest: dict[str, int] = {}
    for name, tokens in reversed(uses):
        newest.setdefault(name, tokens)
    # All that it has are newer than what it lost, and fit.
    order = list(newest)
    kept = [name for name in order if name in cache]
    assert list(cache) == kept[::-1]
    assert kept == order[: len(kept)]
    assert sum(newest[name] for name in kept) <= 1000
