"""In which order systems take turns, and what reports say of it."""

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from conserve_lab.rounds import orders


@given(
    systems=st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=8, unique=True),
    count=st.integers(0, 30),
    seed=st.integers(0, 2**32),
)
def test_every_system_is_as_often_in_each_place(systems: list[str], count: int, seed: int) -> None:
    found = orders(systems, count, seed)
    assert len(found) == count
    assert all(sorted(names) == sorted(systems) for names in found)
    for place in range(len(systems)):
        seen = Counter(names[place] for names in found)
        times = [seen[system] for system in systems]
        assert max(times) - min(times) <= 1
    # Of whole blocks, exactly as often.
    whole = found[: count // len(systems) * len(systems)]
    assert len({(s, p): 0 for names in whole for p, s in enumerate(names)}) in (
        0, len(systems) ** 2,
    )  # fmt: skip
    assert orders(systems, count, seed) == found
    assert orders(systems, count + 3, seed)[:count] == found


def test_the_order_is_drawn() -> None:
    drawn = {str(orders(["a", "b", "c"], 6, seed)) for seed in range(50)}
    assert len(drawn) > 40
    # Nor does one always follow the same other.
    followed = {
        (first, second)
        for names in orders(list("abcd"), 40, 0)
        for first, second in pairwise(names)
    }
    assert len(followed) == 12
