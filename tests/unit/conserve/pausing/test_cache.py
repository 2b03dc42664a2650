"""An engine's prefix cache, followed from outside."""

from hypothesis import given
from hypothesis import strategies as st

from conserve.pausing import EngineCache


def left(cache: EngineCache) -> dict[str, int]:
    return dict(cache._left)


def test_the_longest_unused_goes_first_from_its_end_on() -> None:
    cache = EngineCache(1000)
    for name in "abc":
        cache.use(name, 300)
    cache.use("a", 350)
    assert left(cache) == {"b": 300, "c": 300, "a": 350}
    cache.use("d", 150)
    assert left(cache) == {"b": 200, "c": 300, "a": 350, "d": 150}
    cache.use("d", 250)
    assert left(cache) == {"b": 100, "c": 300, "a": 350, "d": 250}
    cache.use("e", 500)
    assert left(cache) == {"a": 250, "d": 250, "e": 500}
    cache.use("a", 350)
    assert left(cache) == {"d": 150, "e": 500, "a": 350}


def test_a_history_stays_even_if_it_is_longer_than_all() -> None:
    cache = EngineCache(100)
    cache.use("a", 50)
    cache.use("b", 500)
    assert left(cache) == {"b": 500}
    cache.drop("b")
    cache.use("c", 100)
    cache.drop("nobody")
    assert left(cache) == {"c": 100}


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(1, 400)), max_size=80))
def test_it_keeps_the_newest_that_fit_and_the_beginning_of_one_more(
    uses: list[tuple[str, int]],
) -> None:
    cache = EngineCache(1000)
    for name, tokens in uses:
        cache.use(name, tokens)
    assert sum(left(cache).values()) <= 1000
    newest: dict[str, int] = {}
    for name, tokens in reversed(uses):
        newest.setdefault(name, tokens)
    order = [name for name in newest if cache.left_tokens(name)]
    assert [*left(cache)] == order[::-1]
    assert order == list(newest)[: len(order)]
    assert all(cache.left_tokens(name) == newest[name] for name in order[:-1])


def test_with_less_room_less_stays() -> None:
    cache = EngineCache(1000)
    for name in "abc":
        cache.use(name, 300)
    cache.resize(500)
    assert (left(cache), cache.tokens) == ({"b": 200, "c": 300}, 500)
    cache.resize(0)
    assert (left(cache), cache.tokens) == ({}, 0)
