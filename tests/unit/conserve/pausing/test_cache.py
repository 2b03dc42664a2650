"""Engines' prefix caches and host memory, followed from outside."""

import random
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from conserve.pausing.cache import EngineCache, HostMemory


def left(cache: EngineCache) -> dict[str, int]:
    return {one: cache.left_tokens(one) for one in cache}


def test_the_longest_unused_goes_first_from_its_end_on() -> None:
    cache = EngineCache(1000)
    for name in "abc":
        cache.use(name, 300, 0.0)
    cache.use("a", 350, 0.0)
    assert left(cache) == {"b": 300, "c": 300, "a": 350}
    cache.use("d", 150, 0.0)
    assert left(cache) == {"b": 200, "c": 300, "a": 350, "d": 150}
    cache.use("d", 250, 0.0)
    assert left(cache) == {"b": 100, "c": 300, "a": 350, "d": 250}
    cache.use("e", 500, 0.0)
    assert left(cache) == {"a": 250, "d": 250, "e": 500}
    cache.use("a", 350, 0.0)
    assert left(cache) == {"d": 150, "e": 500, "a": 350}


def test_a_history_stays_even_if_it_is_longer_than_all() -> None:
    cache = EngineCache(100)
    cache.use("a", 50, 0.0)
    cache.use("b", 500, 0.0)
    assert left(cache) == {"b": 500}
    cache.drop("b")
    cache.use("c", 100, 0.0)
    cache.drop("nobody")
    assert left(cache) == {"c": 100}


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(1, 400)), max_size=80))
def test_it_keeps_the_newest_that_fit_and_the_beginning_of_one_more(
    uses: list[tuple[str, int]],
) -> None:
    cache = EngineCache(1000)
    for name, tokens in uses:
        cache.use(name, tokens, 0.0)
    assert sum(left(cache).values()) <= 1000
    newest: dict[str, int] = {}
    for name, tokens in reversed(uses):
        newest.setdefault(name, tokens)
    order = [name for name in newest if cache.left_tokens(name)]
    assert [*left(cache)] == order[::-1]
    assert order == list(newest)[: len(order)]
    assert all(cache.left_tokens(name) == newest[name] for name in order[:-1])


def test_with_less_room_less_stays() -> None:
    cache = HostMemory(1000)
    for name in "abc":
        cache.use(name, 300, 0.0)
    cache.resize(500)
    assert (left(cache), cache.tokens) == ({"b": 200, "c": 300}, 500)
    cache.resize(0)
    assert (left(cache), cache.tokens) == ({}, 0)


def test_the_oldest_use_says_what_is_gone() -> None:
    cache = EngineCache(1000)
    assert cache.oldest_s == inf
    for now_s, name in enumerate("abc"):
        cache.use(name, 300, float(now_s))
    assert cache.oldest_s == 0.0
    cache.use("a", 300, 3.0)
    assert cache.oldest_s == 1.0
    cache.use("d", 500, 4.0)
    assert (left(cache), cache.oldest_s) == ({"c": 200, "a": 300, "d": 500}, 2.0)
    cache.drop("c")
    assert cache.oldest_s == 3.0


# --- Host memory ----------------------------------------------------------------------------------


def test_the_oldest_says_for_how_long_it_keeps_anything() -> None:
    host = HostMemory(1000)
    host.use("a", 500, 1.0)
    host.use("b", 390, 2.0)
    assert host.keeps("a", 1e9)  # There is room.
    host.use("c", 300, 30.0)
    assert (host.left_tokens("a"), host.tokens) == (310, 1000)
    assert [host.keeps(name, 25.0) for name in ("a", "b", "c", "d")] == [False, False, True, False]
    host.use("a", 200, 40.0)
    # It has not become shorter by a shorter prompt, and it is not the oldest any more.
    assert (host.left_tokens("a"), host.keeps("a", 38.0), host.keeps("a", 39.0)) == (
        310,
        True,
        False,
    )
    host.drop("b")
    host.drop("b")
    assert (host.tokens, host.keeps("c", 1e9)) == (610, True)
    host.resize(400)
    assert (host.left_tokens("c"), host.left_tokens("a")) == (90, 310)
    assert (host.keeps("c", 1.0), host.keeps("a", 10.0)) == (False, True)


def test_what_is_renewed_outlives_what_came_later() -> None:
    host = HostMemory(1000)
    host.use("waits", 500, 1.0, shared_tokens=100)
    assert not host.renew("waits", 15.0, 2.0)  # There is room.
    host.use("later", 500, 3.0)
    assert host.renew("waits", 15.0, 4.0)
    assert not host.renew("gone", 15.0, 4.0)
    host.use("last", 400, 5.0)
    assert [host.left_tokens(name) for name in ("waits", "later", "last")] == [500, 200, 400]
    host.use("last", 400, 20.0)
    host.use("waits", 0, 30.0, shared_tokens=100)
    assert not host.renew("waits", 15.0, 31.0)  # It is kept for long anyway.


def test_of_what_is_longer_than_the_memory_its_beginning_stays() -> None:
    host = HostMemory(100)
    host.use("a", 50, 1.0)
    host.use("long", 250, 2.0)
    assert "a" not in host
    assert (host.left_tokens("long"), host.tokens) == (100, 100)


def test_what_several_begin_with_is_there_once() -> None:
    """It is counted with the first; later ones count only their own part."""
    host = HostMemory(1000)
    host.use("first", 300, 1.0)
    host.use("second", 280, 2.0, shared_tokens=250)
    assert (host.left_tokens("first"), host.left_tokens("second"), host.tokens) == (300, 280, 330)
    # What it shares may become more, or less.
    host.use("second", 400, 3.0, shared_tokens=300)
    assert (host.left_tokens("second"), host.tokens) == (400, 400)
    host.use("second", 0, 4.0)
    assert (host.left_tokens("second"), host.tokens) == (400, 700)
    host.use("second", 100, 5.0, shared_tokens=500)
    assert (host.left_tokens("second"), host.tokens) == (400, 300)


def test_its_tokens_are_those_that_are_left_of_each() -> None:
    host, draw = HostMemory(1000), random.Random(5)
    for now in range(3000):
        name = f"h{draw.randrange(60)}"
        if draw.random() < 0.1:
            host.drop(name)
        elif draw.random() < 0.02:
            host.resize(draw.choice([0, 300, 1000]))
        else:
            host.use(name, draw.randrange(1, 200), float(now))
        assert sum(map(host.left_tokens, host)) == host.tokens


USES = st.lists(
    st.tuples(
        st.sampled_from("abcdef"), st.integers(1, 400), st.integers(0, 50), st.integers(0, 100)
    ),
    max_size=20,
    unique_by=lambda use: use[2],
)


@given(USES, st.randoms(use_true_random=False), st.sampled_from([300, 10_000]))
def test_what_is_taken_over_is_as_if_it_had_been_seen(
    uses: list[tuple[str, int, int, int]], draw: random.Random, capacity_tokens: int
) -> None:
    """The order and the parts in which it is reported do not matter."""
    seen, told = HostMemory(capacity_tokens), HostMemory(capacity_tokens)
    for key, tokens, now_s, shared_tokens in sorted(uses, key=lambda use: use[2]):
        seen.use(key, tokens, now_s, shared_tokens)
    shuffled = draw.sample(uses, len(uses))
    at = draw.randint(0, len(uses))
    for part in (shuffled[:at], shuffled[at:]):
        told.take_over(part)
    assert told.tokens <= capacity_tokens
    newest = {key: now_s for key, _, now_s, _ in sorted(uses, key=lambda use: use[2])}
    order = [key for key in sorted(newest, key=lambda key: newest[key]) if key in told]
    assert list(told) == order
    if capacity_tokens == 10_000 and len(newest) == len(uses):
        assert [told.left_tokens(key) for key in order] == [seen.left_tokens(key) for key in order]
        assert list(seen) == order
