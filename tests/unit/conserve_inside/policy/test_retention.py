"""KV that is held between turns, and the order in which it is given up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conserve_inside.policy import Pin, Retention


def test_a_history_is_held_for_as_long_as_its_own_gaps_say() -> None:
    kept = Retention()
    for _ in range(20):
        kept.returned("tools", 5.0)
        kept.returned("user", 500.0)
    assert kept.hold_for_s("tools") == pytest.approx(10.0)
    # Held in vain: the next turn comes later than anything is held.
    assert kept.hold_for_s("user") == 2.0
    assert kept.hold_for_s("user", expected_s=20.0) == 40.0
    assert kept.hold_for_s("tools", expected_s=40.0) == 60.0
    assert kept.hold_for_s("tools", expected_s=0.1) == 2.0
    kept.forget("tools")
    assert kept.hold_for_s("tools") == 2.0


PINS = st.dictionaries(
    st.text("abcdef", min_size=1, max_size=3),
    st.builds(Pin, st.integers(0, 3), st.integers(1, 99), st.floats(0, 20), st.booleans()),
    max_size=12,
)


@given(PINS)
def test_nobody_gives_up_before_one_whose_pin_is_worth_less(pins: dict[str, Pin]) -> None:
    """The rules one by one, over all pairs."""
    order = Retention().give_up_order(pins, now_s=10.0)
    assert sorted(order) == sorted(pins)
    for at, key in enumerate(order):
        for later_key in order[at + 1 :]:
            first, later = pins[key], pins[later_key]
            if (first.until_s <= 10.0) != (later.until_s <= 10.0):
                assert first.until_s <= 10.0
            elif first.awaited != later.awaited:
                assert later.awaited
            elif first.level != later.level:
                assert first.level > later.level
            else:
                assert first.blocks >= later.blocks


@given(st.lists(st.floats(0, 1e6), max_size=20), st.none() | st.floats(0, 1e6), st.booleans())
def test_nothing_is_held_for_longer_than_the_most(
    gaps: list[float], expected_s: float | None, last: bool
) -> None:
    kept = Retention(hold_s=1.0, longest_s=30.0)
    for gap_s in gaps:
        kept.returned("c", gap_s)
    held_s = kept.hold_for_s("c", expected_s, last)
    assert held_s == 0.0 if last else 1.0 <= held_s <= 30.0
