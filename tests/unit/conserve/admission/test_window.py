"""The window: it stays in bounds, shrinks slowly, and never blocks for good."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conserve.admission import Admission, Admitted, Pressure, Ticket, Window
from conserve.conversations import ConversationTable
from conserve.pausing import Pausing
from conserve.policies import room_policies
from conserve.turn import TurnStats
from tests.unit.conserve.conversations.scene import a_table

CALM, MIDDLING, HIGH = Pressure(cpu=0.5), Pressure(cpu=0.8), Pressure(cpu=0.95)
INTERVAL_S, PERSISTS_S = 10.0, 20.0


def a_window() -> Window:
    return Window(2, 1.0, 0.5, INTERVAL_S, PERSISTS_S, forget_s=60.0)


def after(window: Window, *steps: tuple[Pressure, int], from_s: float = 0.0) -> list[float]:
    limits = []
    for number, (pressure, active) in enumerate(steps):
        window.observe(from_s + number * INTERVAL_S, active, pressure)
        limits.append(window.limit)
    return limits


def test_before_the_first_overload_there_is_no_bound() -> None:
    window = a_window()
    assert after(window, (CALM, 500), (MIDDLING, 500), (HIGH, 500), (HIGH, 500)) == [math.inf] * 4


def test_overload_that_lasts_halves_what_is_at_work_each_interval_down_to_the_least() -> None:
    window = a_window()
    limits = after(window, *[(HIGH, 40)] * 3, (HIGH, 20), (HIGH, 10), (HIGH, 5), (HIGH, 2))
    assert limits == [math.inf, math.inf, 20, 10, 5, 2, 2]


@pytest.mark.parametrize("high", [Pressure(cpu=0.95), Pressure(tools=0.5)])
def test_either_pressure_is_enough(high: Pressure) -> None:
    assert after(a_window(), *[(high, 40)] * 3)[-1] == 20


def test_the_live_window_does_not_follow_kv() -> None:
    window = room_policies(300.0, pauses=True).window
    assert window is not None
    assert after(window, *[(Pressure(kv=1.0), 40)] * 9)[-1] == math.inf
    assert after(window, *[(Pressure(cpu=0.95), 40)] * 4, from_s=90.0)[-1] == 28


def test_between_the_bounds_it_stays_as_it_is() -> None:
    window = a_window()
    after(window, *[(HIGH, 40)] * 3)
    # Not low yet: it is an overload still. Low, it grows; high anew, not at once an overload.
    limits = after(window, (MIDDLING, 20), (CALM, 10), (MIDDLING, 10), (HIGH, 10), from_s=30.0)
    assert limits == [10, 11, 11, 11]


def test_tools_that_take_a_little_longer_do_not_hold_it_back() -> None:
    window = a_window()
    after(window, *[(HIGH, 40)] * 3)
    longer = Pressure(cpu=0.5, tools=0.45)
    assert after(window, *[(longer, 20)] * 3, from_s=30.0) == [21, 22, 23]


def test_each_pressure_has_its_own_cap_meanwhile() -> None:
    window = Window(2, 1.0, 1.0, INTERVAL_S, PERSISTS_S)
    assert after(window, *[(Pressure(cpu=1.0), 40)] * 3)[-1] == 36
    window = Window(2, 1.0, 1.0, INTERVAL_S, PERSISTS_S)
    # Tools take four times as long as usual, and with half of the histories twice as long.
    assert after(window, *[(Pressure(tools=0.75), 40)] * 3)[-1] == 20


def test_it_is_gone_once_it_has_been_wide_for_long() -> None:
    window = a_window()
    after(window, *[(HIGH, 40)] * 3)
    # Twice the active ones, at 10, after none came for a while.
    limits = after(window, *[(CALM, 10)] * 8, from_s=30.0)
    assert limits[:6] == [21, 22, 23, 24, 25, 26]
    assert limits[-1] == math.inf


def test_sooner_than_an_interval_nothing_changes() -> None:
    window = a_window()
    for tenth in range(3 * int(PERSISTS_S) * 10):
        window.observe(tenth / 10, 40, HIGH)
    # At 20, 30, 40 and 50 s.
    assert window.limit == 40 // 16


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([CALM, MIDDLING, HIGH]), st.integers(0, 60)), max_size=60)
)
def test_laws(steps: list[tuple[Pressure, int]]) -> None:
    window, before = a_window(), math.inf
    high_s, overload = 0.0, False
    for number, (pressure, active) in enumerate(steps):
        if pressure is HIGH:
            high_s += INTERVAL_S
            overload = overload or high_s > PERSISTS_S
        else:
            high_s = 0.0
            overload = overload and pressure is MIDDLING
        window.observe(number * INTERVAL_S, active, pressure)
        assert window.limit >= 2
        if window.limit < before:
            assert overload
        if overload:
            assert window.limit <= max(2, active / 2)
        elif pressure is CALM:
            assert window.limit > before or before == math.inf
        before = window.limit
    # And from anywhere it is gone again, some time after pressure is.
    after(window, *[(CALM, 5)] * 100, from_s=len(steps) * INTERVAL_S)
    assert window.limit == math.inf


def an_admission(limit: int) -> tuple[ConversationTable, Admission]:
    """With a window of this size, as after an overload."""
    table = a_table(decoders=1, capacity_tokens=100_000, pausing=Pausing())
    window = a_window()
    after(window, *[(HIGH, 2 * limit)] * 3, from_s=-40.0)
    assert window.limit == limit
    return table, Admission(table, 64, 60, window=window)


def test_the_window_bounds_who_is_at_work() -> None:
    table, admission = an_admission(limit=3)
    began = [admission.enter(f"c{number}", 100, 0.0) for number in range(5)]
    assert [isinstance(one, Admitted) for one in began] == [True, True, True, False, False]
    assert admission.ahead("c3", 0.0) == (0, "window")
    assert admission.ahead("c4", 0.0) == (1, "window")
    first = began[0]
    assert isinstance(first, Admitted)
    table.advance(first.turn, "d1", TurnStats(100, 10, 0, 0), (), 5.0)
    # It is with its tools.
    assert table.active(10.0) == 3
    assert admission.admit(10.0) == []
    # It may come back, and is not active now.
    assert [one.history.id for one in admission.admit(36.0)] == ["c3"]
    table.release("c1")
    assert [one.history.id for one in admission.admit(37.0)] == ["c4"]


def test_a_bound_conversation_does_not_ask_the_window() -> None:
    table, admission = an_admission(limit=2)
    for number in range(2):
        one = admission.enter(f"c{number}", 100, 0.0)
        assert isinstance(one, Admitted)
        table.advance(one.turn, "d1", TurnStats(100, 10, 0, 0), (), 1.0)
    later = [admission.enter(f"d{number}", 100, 40.0) for number in range(2)]
    assert all(isinstance(one, Admitted) for one in later)
    assert table.begin("c0", 41.0) is not None
    assert table.active(41.0) == 3


def test_the_window_turns_nobody_away() -> None:
    _, admission = an_admission(limit=2)
    for number in range(2):
        assert isinstance(admission.enter(f"c{number}", 100, 0.0), Admitted)
    assert isinstance(admission.enter("waits", 100, 0.0), Ticket)
    assert admission.admit(49.0) == []
    assert [one.history.id for one in admission.admit(50.0)] == ["waits"]


def computed_again(capacity_tokens: int) -> Admission:
    """Thirty conversations, half of which their decoder has lost, four times."""
    table = a_table(decoders=1, capacity_tokens=capacity_tokens, pausing=Pausing())
    admission = Admission(table, 64, 60, window=Window(interval_s=10, persists_s=10))
    for number in range(30):
        one = admission.enter(f"c{number}", 100, 0.0)
        assert isinstance(one, Admitted)
        table.advance(one.turn, "d1", TurnStats(100, 10, 0, 0), (), 1.0)
    assert not admission.observe(1.0)
    for at_s in (11.0, 21.0, 31.0):
        for number in range(30):
            conversation = table.begin(f"c{number}", at_s)
            assert conversation is not None
            # Of the 110 tokens that it had its engine has 50.
            stats = TurnStats(110, 0, 50, 0)
            table.advance(conversation.newest_turn, "d1", stats, (), at_s)
        admission.observe(at_s)
        assert not admission.observe(at_s + 1.0)
    return admission


def test_what_is_computed_again_is_pressure() -> None:
    admission = computed_again(capacity_tokens=5_000)
    assert admission.window is not None
    assert admission.window.pressure.kv == pytest.approx(60 / 110)


def test_what_is_computed_again_is_no_pressure_where_there_is_room() -> None:
    """Nothing was evicted, so fewer conversations at a time would not help."""
    admission = computed_again(capacity_tokens=100_000)
    assert admission.window is not None
    assert admission.window.pressure.kv == 0
    assert admission.window.limit == math.inf
