"""How many replicas, from one need after the other: bounded, steady, and never too few for long."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscale.autoscaler import Limits, Scaling, scale

limits = st.builds(
    lambda least, more, down, target, up, delay_s, cool_s: Limits(
        least=least,
        most=least + more,
        target=target * up,
        up_at=up,
        down_at=down * target * up,
        down_delay_s=delay_s,
        cool_down_s=cool_s,
    ),
    st.integers(1, 5),
    st.integers(0, 30),
    st.floats(0.1, 0.95),
    st.floats(0.3, 0.95),
    st.floats(0.5, 1),
    st.floats(0, 100),
    st.floats(0, 100),
)
needs = st.floats(0, 100)
signals = st.lists(st.none() | needs | st.sampled_from([math.nan, math.inf]), max_size=40)
# Where no delay is looked at.
AT_ONCE = Limits(1, 10, down_delay_s=0, cool_down_s=0)


def run(
    settings: Limits, start: int, needed: list[float | None], every_s: float = 10.0
) -> list[int]:
    state, seen = Scaling(start), []
    for step, need in enumerate(needed):
        state = scale(settings, state, need, step * every_s)
        seen.append(state.replicas)
    return seen


@settings(max_examples=50, deadline=None)
@given(limits=limits, start=st.integers(0, 60), needed=signals)
def test_never_outside_the_bounds(limits: Limits, start: int, needed: list[float | None]) -> None:
    assert all(limits.least <= n <= limits.most for n in run(limits, start, needed))


@settings(max_examples=50, deadline=None)
@given(limits=limits, start=st.integers(1, 35), needed=needs)
def test_a_constant_signal_changes_the_number_at_most_once(
    limits: Limits, start: int, needed: float
) -> None:
    start = min(max(start, limits.least), limits.most)
    seen = [start, *run(limits, start, [needed] * 30)]
    assert sum(a != b for a, b in pairwise(seen)) <= 1


@settings(max_examples=50, deadline=None)
@given(
    limits=limits,
    current=st.integers(1, 35),
    changed_s=st.none() | st.floats(0, 200),
    low_since_s=st.none() | st.floats(0, 200),
    needs=st.tuples(needs, needs),
)
def test_more_is_never_answered_with_less(
    limits: Limits,
    current: int,
    changed_s: float | None,
    low_since_s: float | None,
    needs: tuple[float, float],
) -> None:
    before = Scaling(current, changed_s, low_since_s)
    few, many = (scale(limits, before, need, 200.0).replicas for need in sorted(needs))
    assert few <= many


@settings(max_examples=50, deadline=None)
@given(limits=limits, start=st.integers(1, 35), needed=needs, gap=st.integers(1, 20))
def test_after_missing_data_it_ends_where_it_would_have_been(
    limits: Limits, start: int, needed: float, gap: int
) -> None:
    steady = run(limits, start, [needed] * 30)
    broken = run(limits, start, [needed] * 3 + [None] * gap + [needed] * 30)
    assert broken[-1] == steady[-1]
    # And without data nothing moves.
    assert len(set(broken[2 : 3 + gap])) == 1


@settings(max_examples=50, deadline=None)
@given(limits=limits, start=st.integers(1, 35), needed=needs)
def test_it_settles_where_the_target_is_kept_if_the_bounds_allow(
    limits: Limits, start: int, needed: float
) -> None:
    settled = run(limits, start, [needed] * 30)[-1]
    assert needed <= limits.up_at * settled or settled == limits.most
    fewer = math.ceil(needed / limits.target)
    assert not (needed < limits.down_at * settled and max(fewer, limits.least) < settled)


def test_it_goes_up_at_once_and_before_saturation() -> None:
    assert run(Limits(1, 5), 1, [0.84, 0.86]) == [1, 2]
    assert run(Limits(1, 5), 1, [2.0]) == [3]


def test_it_goes_down_only_after_a_low_spell_without_a_break() -> None:
    slow = Limits(1, 5, down_delay_s=30, cool_down_s=0)
    assert run(slow, 3, [0.1] * 4) == [3, 3, 3, 1]
    assert run(slow, 3, [0.1, 0.1, 2.0, 0.1, 0.1, 0.1, 0.1]) == [3] * 6 + [1]
    assert run(slow, 3, [0.1, 0.1, None, 0.1, 0.1, 0.1, 0.1]) == [3] * 6 + [1]


def test_it_cools_down_after_going_up() -> None:
    cool = Limits(1, 5, down_delay_s=0, cool_down_s=25)
    assert run(cool, 1, [2.0, 0.1, 0.1, 0.1]) == [3, 3, 3, 1]


def test_between_the_thresholds_nothing_happens() -> None:
    assert run(AT_ONCE, 2, [1.05, 1.4, 1.69, 1.01]) == [2] * 4


def test_why_says_what_was_needed() -> None:
    assert scale(AT_ONCE, Scaling(1), 1.3, 0).why == "1.30 needed of 1"
    assert scale(AT_ONCE, Scaling(10), 30.0, 0).why == "30.00 needed, and 10 is the most"
    assert scale(AT_ONCE, Scaling(1), None, 0).why == "nothing observed"
    assert scale(replace(AT_ONCE, down_delay_s=9), Scaling(4), 0.1, 0).why.endswith("waiting")


@pytest.mark.parametrize(
    "bad",
    [
        {"least": 0, "most": 1},
        {"least": 3, "most": 2},
        {"least": 1, "most": 2, "down_at": 0.7},
        {"least": 1, "most": 2, "target": 0.9},
        {"least": 1, "most": 2, "up_at": 1.1},
    ],
)
def test_settings_that_would_oscillate_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="give"):
        Limits(**bad)  # type: ignore[arg-type]
