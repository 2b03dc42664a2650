"""Tools' times, and when they are pressure."""

from itertools import count

import pytest

from conserve.conversations import ConversationTable
from conserve.pausing import Pausing, ToolReport, ToolTimes
from conserve.pausing.times import MOST_TOOLS
from tests.unit.conserve.conversations.scene import a_table, start
from tests.unit.conserve.pausing.scene import calls

_numbers = count()


def rounds(
    times: ToolTimes, number: int, took_s: float, at_s: float, calls: int = 20, tool: str = "bash"
) -> float:
    """Run this number of tools at a time, again and again; return when the last ones are done."""
    for _ in range(calls):
        runs = [next(_numbers) for _ in range(number)]
        for run in runs:
            times.begins(run, tool, at_s)
        at_s += took_s
        for run in runs:
            times.ends(run, at_s)
    return at_s


def seen(times: ToolTimes, number: int, at_s: float, tool: str = "bash") -> float:
    """Return the pressure while this number of tools runs."""
    runs = [next(_numbers) for _ in range(number)]
    for run in runs:
        times.begins(run, tool, at_s)
    pressure = times.pressure(at_s)
    for run in runs:
        times.drop(run)
    return pressure


@pytest.fixture
def known() -> ToolTimes:
    """Two at a time take a second."""
    times = ToolTimes()
    assert rounds(times, 2, 1.0, 0.0) == 20.0
    return times


def test_tools_that_take_thrice_as_long_while_ten_times_more_run_are_pressure(
    known: ToolTimes,
) -> None:
    at_s = rounds(known, 20, 3.0, 20.0)
    assert seen(known, 20, at_s) == pytest.approx(2 / 3, abs=0.05)
    # Fewer would take less time, and two are no pressure.
    assert seen(known, 7, at_s) < 0.4
    assert seen(known, 2, at_s) == 0.0


def test_it_ends_with_the_slowness(known: ToolTimes) -> None:
    at_s = rounds(known, 20, 3.0, 20.0)
    at_s = rounds(known, 20, 1.0, at_s)
    assert seen(known, 20, at_s) < 0.05


def test_times_that_are_as_ever_are_no_pressure_however_many_run(known: ToolTimes) -> None:
    assert seen(known, 50, rounds(known, 50, 1.0, 20.0)) == 0.0


def test_a_tool_that_is_slow_while_few_run_is_no_pressure(known: ToolTimes) -> None:
    assert seen(known, 20, rounds(known, 3, 10.0, 20.0, calls=100)) == 0.0


def test_one_slow_call_is_no_pressure(known: ToolTimes) -> None:
    at_s = rounds(known, 20, 1.0, 20.0, calls=5)
    known.begins("slow", "bash", at_s)
    rounds(known, 20, 1.0, at_s, calls=10)
    known.ends("slow", at_s + 10.0)
    assert seen(known, 20, at_s + 10.0) < 0.1


def test_a_tool_that_is_known_from_no_calm_time_is_no_pressure() -> None:
    times = ToolTimes()
    at_s = rounds(times, 20, 3.0, 0.0)
    assert seen(times, 20, at_s) == 0.0
    # It shows while few run how fast it is.
    at_s = rounds(times, 2, 1.0, at_s, calls=200)
    at_s = rounds(times, 20, 3.0, at_s)
    assert seen(times, 20, at_s) > 0.5


def test_a_tool_that_does_not_end_counts_for_a_while(known: ToolTimes) -> None:
    known.begins("short", "bash", 100.0)
    for _ in range(16):
        rounds(known, 1, 60.0, 100.0, calls=1, tool="tests")
    known.begins("long", "tests", 100.0)
    known.pressure(129.0)
    assert known.running == 2
    known.pressure(131.0)
    assert known.running == 1
    # Its next turn comes after hours, for which no tool has run.
    known.ends("short", 9_000.0)
    known.pressure(1_059.0)
    assert known.running == 1
    known.pressure(1_061.0)
    assert known.running == 0


def test_few_tools_are_remembered_the_last_ones(known: ToolTimes) -> None:
    at_s = 20.0
    for number in range(MOST_TOOLS):
        at_s = rounds(known, 1, 1.0, at_s, calls=1, tool=f"tool {number}")
    # What was usual for a shell is forgotten.
    assert seen(known, 20, rounds(known, 20, 3.0, at_s)) < 0.05


# --- In a table ----------------------------------------------------------------------------------


def a_scene() -> ConversationTable:
    table = a_table(decoders=1, capacity_tokens=10_000, pausing=Pausing())
    for name in ("a", "b", "c"):
        start(table, name, 100)
    return table


def test_a_history_runs_the_tool_that_its_answer_calls_until_its_next_turn() -> None:
    table = a_scene()
    calls(table, "a", "bash", 10.0)
    calls(table, "b", "", 10.0)
    calls(table, "c", None, 10.0)
    assert table.tools.times.running == 1
    assert table.begin("a", 12.0) is not None
    assert table.tools.times.running == 0
    calls(table, "a", "bash", 13.0)
    table.release("a")
    assert table.tools.times.running == 0


def test_clients_that_report_say_it_better() -> None:
    table = a_scene()
    calls(table, "a", "bash,read", 10.0)
    for tool in ("bash", "read", "read"):
        table.tools.report("a", ToolReport(tool, tool), 11.0)
    assert table.tools.times.running == 2
    table.tools.report("a", ToolReport("bash", ended=True), 12.0)
    assert table.tools.times.running == 1
    # It ends with the next turn, if not before.
    assert table.begin("a", 13.0) is not None
    assert table.tools.times.running == 0
    calls(table, "a", "bash", 14.0)
    table.tools.report("a", ToolReport("bash", ended=True), 15.0)
    assert table.tools.times.running == 0
