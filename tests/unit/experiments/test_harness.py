"""The harness: rounds, ratios and percentiles."""

import pytest

from experiments.harness import paired_ratio, rounds


def test_a_ratio_is_the_median_of_those_of_the_rounds() -> None:
    ratio, low, high = paired_ratio([1.5, 2.2, 4.4], [1.0, 2.0, 4.0])
    assert ratio == pytest.approx(1.1)
    assert (low, high) == pytest.approx((1.1, 1.5))


def test_each_round_has_everything_once_in_an_order_of_its_own() -> None:
    found = rounds("abc", 50, seed=1, warm_up=2)
    assert [number for number, _ in found] == [number for number in range(-2, 50) for _ in "abc"]
    orders = ["".join(name for _, name in found[n : n + 3]) for n in range(0, len(found), 3)]
    assert {"".join(sorted(order)) for order in orders} == {"abc"}
    assert len(set(orders)) == 6
    assert found == rounds("abc", 50, seed=1, warm_up=2)
