"""When conversations arrive, and which."""

import math
from itertools import islice, pairwise

import numpy as np
import pytest

from conserve_lab.workloads import Arrivals, WorkloadError
from conserve_lab.workloads.plan import choose


def first(arrivals: Arrivals, count: int) -> list[float]:
    return list(islice(arrivals.times_s(), count))


@pytest.mark.parametrize("rate", [0.5, 1.634, 40.0])
def test_poisson_arrivals_have_the_rate_and_exponential_intervals(rate: float) -> None:
    times_s = first(Arrivals("poisson", rate, seed=5), 20_000)
    intervals_s = np.diff([0.0, *times_s])
    assert times_s == sorted(times_s)
    assert np.mean(intervals_s) == pytest.approx(1 / rate, rel=0.03)
    assert np.std(intervals_s) == pytest.approx(1 / rate, rel=0.05)
    assert np.mean(intervals_s > 1 / rate) == pytest.approx(math.exp(-1), rel=0.05)


def test_the_seed_decides() -> None:
    assert first(Arrivals(seed=1), 3_000) == first(Arrivals(seed=1), 3_000)
    assert first(Arrivals(seed=1), 9) != first(Arrivals(seed=2), 9)


def test_even_arrivals_and_all_at_once() -> None:
    assert first(Arrivals("even", 4.0), 5) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert first(Arrivals("together"), 4) == [0.0] * 4


def test_choosing_repeats_nothing_before_all_were_chosen() -> None:
    items = [f"s{number}" for number in range(30)]
    drawn = list(islice(choose(items, seed=3), 95))
    for start in (0, 30, 60):
        assert sorted(drawn[start : start + 30]) == sorted(items)
    assert drawn[:30] != drawn[30:60] != items
    assert drawn == list(islice(choose(items, seed=3), 95))
    assert drawn != list(islice(choose(items, seed=4), 95))
    assert all(a != b for a, b in pairwise(islice(choose(items, seed=3), 30)))
    with pytest.raises(WorkloadError, match="nothing to choose from"):
        next(choose([], seed=0))
