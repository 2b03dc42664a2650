"""Predictions of the next turn from idle times."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conserve.pausing import Gaps
from conserve.pausing.times import MOST_TOOLS

TIMES_S = st.floats(0, 1e6)


def gaps_of(seen: list[tuple[bool, float, str | None]]) -> Gaps:
    gaps = Gaps()
    for returned, idle_s, tool in seen:
        gaps.add(idle_s, tool, ended=not returned)
    return gaps


def test_before_any_was_seen_the_longer_idle_come_back_later() -> None:
    chances = [Gaps().chance(idle_s, 30) for idle_s in (0, 1, 10, 100, 1000, 10_000)]
    assert chances == sorted(chances, reverse=True)
    assert chances[0] == 0.75


def back_within_30_s(seen: list[float], idle_s: float) -> float:
    """The share that came back in time, of those that were idle for as long."""
    as_long = [one for one in seen if one > idle_s]
    return sum(one <= idle_s + 30 for one in as_long) / len(as_long)


def test_it_is_the_share_of_those_that_were_idle_as_long() -> None:
    rng = random.Random(7)
    seen = [rng.expovariate(1 / 20) for _ in range(2000)]
    gaps = gaps_of([(True, one, None) for one in seen])
    for idle_s in (0.0, 5.0, 20.0, 60.0):
        assert abs(gaps.chance(idle_s, 30) - back_within_30_s(seen, idle_s)) < 0.06


def test_who_ended_did_not_come_back() -> None:
    """Two thirds of chats end after a turn, so most that are idle for a minute never come again."""
    gaps = Gaps()
    for _ in range(100):
        gaps.add(3.0)
        gaps.add(1800.0, ended=True)
        gaps.add(1800.0, ended=True)
    assert 0.25 < gaps.chance(0.0, 30) < 0.4
    assert gaps.chance(60.0, 30) < 0.05


@pytest.mark.parametrize("tool", [None, "bash"])
def test_agents_and_tools_change(tool: str | None) -> None:
    gaps = Gaps()
    for _ in range(20_000):
        gaps.add(100.0, tool)
    for _ in range(8_000):
        gaps.add(1.0, tool)
    assert gaps.chance(0.0, 30, tool=tool) > 0.7


# --- By tool -------------------------------------------------------------------------------------

TOOLS = st.sampled_from(["bash", "search", "", None])
SEEN = st.lists(st.tuples(st.booleans(), TIMES_S, TOOLS), max_size=60)


@given(SEEN, TOOLS, TIMES_S, st.floats(0.1, 1e4), st.integers(0, 1000))
def test_it_is_a_chance_that_grows_with_the_time_to_come_and_falls_with_who_is_idle_too(
    seen: list[tuple[bool, float, str | None]], tool: str | None, idle_s: float, within_s: float,
    still_idle: int,
) -> None:  # fmt: skip
    gaps = gaps_of(seen)
    chance = gaps.chance(idle_s, within_s, still_idle, tool)
    assert 0 < chance < 1
    assert chance <= gaps.chance(idle_s, within_s * 2, still_idle, tool)
    assert chance > gaps.chance(idle_s, within_s, still_idle + 1, tool)


@given(SEEN, TIMES_S, st.floats(0.1, 1e4))
def test_a_tool_that_was_not_seen_is_like_all(
    seen: list[tuple[bool, float, str | None]], idle_s: float, within_s: float
) -> None:
    gaps = gaps_of(seen)
    of_all = gaps.chance(idle_s, within_s)
    assert abs(gaps.chance(idle_s, within_s, tool="new") - of_all) < 1e-9


@given(SEEN, TOOLS, st.floats(0, 1e4), st.floats(30, 1e3), st.floats(0.3, 0.9))
def test_who_comes_back_in_time_does_not_lower_it(
    seen: list[tuple[bool, float, str | None]], tool: str | None, idle_s: float, within_s: float,
    at: float,
) -> None:  # fmt: skip
    """Well within the time, since a gap counts for its whole bucket, a quarter wide."""
    back_s = idle_s + at * within_s
    if back_s < 1.3 * idle_s:
        return
    before = gaps_of(seen)
    after = gaps_of([*seen, (True, back_s, tool)])
    assert after.chance(idle_s, 2 * within_s, 0, tool) >= before.chance(
        idle_s, 2 * within_s, 0, tool
    )


def test_a_tool_that_was_seen_often_is_judged_by_its_own_gaps() -> None:
    rng = random.Random(3)
    own = [rng.expovariate(1 / 20) for _ in range(400)]
    gaps = Gaps()
    for one in own:
        gaps.add(one, "own")
        for _ in range(4):
            gaps.add(1800.0, "", ended=True)
    for idle_s in (0.0, 5.0, 20.0):
        back = back_within_30_s(own, idle_s)
        assert abs(gaps.chance(idle_s, 30, tool="own") - back) < 0.08
        assert gaps.chance(idle_s, 30, tool="") < 0.05
        assert gaps.chance(idle_s, 30) < 0.25


def test_a_tool_that_was_seen_once_is_still_judged_by_all() -> None:
    gaps = Gaps()
    for _ in range(100):
        gaps.add(1800.0, "", ended=True)
    gaps.add(2.0, "bash")
    assert gaps.chance(0.0, 30) < gaps.chance(0.0, 30, tool="bash") < 0.3


def test_so_many_tools_are_told_apart_and_those_seen_least_are_forgotten() -> None:
    gaps = Gaps()
    for number in range(3000):
        gaps.add(2.0, "bash")
        gaps.add(500.0, f"made-up-{number}")
    assert len(gaps._tools) == MOST_TOOLS
    assert gaps.chance(0.0, 30, tool="bash") > 0.95
    # What is left of them is judged by all, nearly.
    assert 0.3 < gaps.chance(0.0, 30, tool="made-up-0") < 0.6
