"""For how long host memory keeps what it gets."""

import random
from math import inf

from conserve.pausing.host import HostMemory


def test_the_oldest_says_for_how_long_it_keeps_anything() -> None:
    host = HostMemory(1000)
    host.use("a", 500, 1.0)
    host.use("b", 390, 2.0)
    assert host.oldest_s == -inf  # There is room.
    host.use("c", 300, 3.0)
    assert (host.left_tokens("a"), host.tokens, host.oldest_s) == (310, 1000, 1.0)
    host.use("a", 200, 4.0)
    # It has not become shorter by a shorter prompt, and it is not the oldest any more.
    assert (host.left_tokens("a"), host.oldest_s) == (310, 2.0)
    host.drop("b")
    host.drop("b")
    assert (host.tokens, host.oldest_s) == (610, -inf)
    host.resize(400)
    assert (host.left_tokens("c"), host.left_tokens("a"), host.oldest_s) == (90, 310, 3.0)


def test_of_what_is_longer_than_the_memory_its_beginning_stays() -> None:
    host = HostMemory(100)
    host.use("a", 50, 1.0)
    host.use("long", 250, 2.0)
    assert "a" not in host
    assert (host.left_tokens("long"), host.tokens, host.oldest_s) == (100, 100, 2.0)


def test_it_remembers_when_of_nothing_that_is_gone() -> None:
    host, draw = HostMemory(1000), random.Random(5)
    for now in range(3000):
        name = f"h{draw.randrange(60)}"
        if draw.random() < 0.1:
            host.drop(name)
        elif draw.random() < 0.02:
            host.resize(draw.choice([0, 300, 1000]))
        else:
            host.use(name, draw.randrange(1, 200), float(now))
        there = {f"h{number}" for number in range(60) if f"h{number}" in host}
        assert set(host._used_s) == there
        assert sum(map(host.left_tokens, there)) == host.tokens
