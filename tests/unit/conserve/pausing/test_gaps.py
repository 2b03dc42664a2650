"""What idle times that were seen say of the next turn."""

import random

from hypothesis import given
from hypothesis import strategies as st

from conserve.pausing import Gaps

TIMES_S = st.floats(0, 1e6)


@given(st.lists(TIMES_S, max_size=60), st.lists(TIMES_S, max_size=60), TIMES_S, st.floats(0.1, 1e4))
def test_it_is_a_chance_and_grows_with_the_time_to_come(
    returned: list[float], ended: list[float], idle_s: float, within_s: float
) -> None:
    gaps = Gaps()
    for one in returned:
        gaps.returned(one)
    for one in ended:
        gaps.ended(one)
    assert 0 < gaps.chance(idle_s, within_s) < 1
    assert gaps.chance(idle_s, within_s) <= gaps.chance(idle_s, within_s * 2)


def test_before_any_was_seen_the_longer_idle_come_back_later() -> None:
    chances = [Gaps().chance(idle_s, 30) for idle_s in (0, 1, 10, 100, 1000, 10_000)]
    assert chances == sorted(chances, reverse=True)
    assert chances[0] == 0.75


def test_it_is_the_share_of_those_that_were_idle_as_long() -> None:
    rng = random.Random(7)
    seen = [rng.expovariate(1 / 20) for _ in range(2000)]
    gaps = Gaps()
    for one in seen:
        gaps.returned(one)
    for idle_s in (0.0, 5.0, 20.0, 60.0):
        as_long = [one for one in seen if one > idle_s]
        back = sum(one <= idle_s + 30 for one in as_long) / len(as_long)
        assert abs(gaps.chance(idle_s, 30) - back) < 0.06


def test_who_ended_did_not_come_back() -> None:
    """Two thirds of chats end after a turn: most that are idle for a minute never come again."""
    gaps = Gaps()
    for _ in range(100):
        gaps.returned(3.0)
        gaps.ended(1800.0)
        gaps.ended(1800.0)
    assert 0.25 < gaps.chance(0.0, 30) < 0.4
    assert gaps.chance(60.0, 30) < 0.05


def test_agents_change() -> None:
    gaps = Gaps()
    for _ in range(20_000):
        gaps.returned(100.0)
    for _ in range(8_000):
        gaps.returned(1.0)
    assert gaps.chance(0.0, 30) > 0.7
