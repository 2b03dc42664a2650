"""The tools that histories wait for, from their answers and from clients' reports."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conserve.conversations import ConversationTable
from conserve.history import History
from conserve.pausing import Pausing, RunningTools, ToolReport, TooManyTools, tool_called
from conserve.pausing.tools import MOST_NAME_CHARS, MOST_RUNNING, Wait
from tests.unit.conserve.conversations.scene import a_table, start, the
from tests.unit.conserve.pausing.scene import calls, paused

JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=8,
)
NAMES = st.text(max_size=200)


def answer(*names: Any) -> dict[str, Any]:
    return {"tool_calls": [{"function": {"name": name, "arguments": "{}"}} for name in names]}


@pytest.mark.parametrize(
    ("answer", "called"),
    [
        ({"role": "assistant", "content": "done"}, ""),
        (answer(), ""),
        (answer("bash"), "bash"),
        (answer("read", "bash", "read"), "bash,read"),
        (answer("d", "c", "b", "a"), "a,b,c"),
        (answer("a\nb\x00"), "a?b?"),
        (answer(None), "?"),
    ],
)
def test_an_answer_is_known_by_what_it_calls(answer: dict[str, Any], called: str) -> None:
    assert tool_called(answer) == called


@given(st.lists(NAMES, min_size=1), JSON)
def test_whatever_is_called_has_a_short_name_that_can_be_shown(
    names: list[str], anything: Any
) -> None:
    called = tool_called(answer(*names))
    assert 0 < len(called) <= MOST_NAME_CHARS
    assert called.isprintable()
    assert len(tool_called({"tool_calls": anything})) <= MOST_NAME_CHARS


# --- Reports -------------------------------------------------------------------------------------


def test_a_history_waits_for_the_newest_tool_that_runs() -> None:
    tools = RunningTools()
    tools.report("c", ToolReport("search", "1"), 10.0)
    tools.report("c", ToolReport("bash", "2"), 20.0)
    assert tools.wait("c", "bash,search", 5.0) == Wait("bash", 20.0)
    assert tools.report("c", ToolReport("bash", "2", ended=True), 23.0) == 3.0
    assert tools.wait("c", "bash,search", 5.0) == Wait("search", 10.0)
    assert tools.report("c", ToolReport("search", ended=True), 40.0) == 30.0
    assert tools.wait("c", "bash,search", 5.0) == Wait("search", 40.0, tool_ended=True)
    # Another begins after all: its turn does not come yet.
    tools.report("c", ToolReport("bash", "3"), 41.0)
    assert tools.wait("c", "bash,search", 5.0) == Wait("bash", 41.0)


def test_a_report_that_came_twice_counts_once() -> None:
    tools = RunningTools()
    for now_s in (10.0, 11.0):
        tools.report("c", ToolReport("bash", "1"), now_s)
    assert len(tools.running("c")) == 1
    assert tools.report("c", ToolReport("bash", "1", ended=True), 12.0) == 2.0
    assert tools.report("c", ToolReport("bash", "1", ended=True), 13.0) is None
    # Without ids two of a name are two.
    for _ in range(2):
        tools.report("c", ToolReport("bash"), 14.0)
    assert len(tools.running("c")) == 2


def test_an_end_that_comes_after_the_next_turn_has_begun_says_nothing() -> None:
    tools = RunningTools()
    assert tools.report("c", ToolReport("bash", ended=True), 10.0, in_turn=True) is None
    assert len(tools) == 0
    # What an answer calls may begin while it is still put out.
    tools.report("c", ToolReport("bash"), 11.0, in_turn=True)
    assert tools.report("c", ToolReport("bash", ended=True), 12.0, in_turn=True) == 1.0
    assert tools.wait("c", "bash", 13.0) == Wait("bash", 13.0, tool_ended=True)


def test_so_many_run_at_a_time() -> None:
    tools = RunningTools()
    for _ in range(MOST_RUNNING):
        tools.report("c", ToolReport("bash"), 1.0)
    with pytest.raises(TooManyTools):
        tools.report("c", ToolReport("bash"), 1.0)
    tools.report("c", ToolReport("bash", ended=True), 2.0)
    tools.report("c", ToolReport("bash"), 3.0)
    assert len(tools.running("c")) == MOST_RUNNING


REPORTS = st.lists(
    st.tuples(
        st.sampled_from(["c", "d"]),
        st.sampled_from(["bash", "search"]),
        st.sampled_from([None, "1", "2"]),
        st.booleans() | st.none(),
        st.floats(0, 100),
    ),
    max_size=40,
)


@given(REPORTS)
def test_nothing_is_left_of_who_is_forgotten(
    reports: list[tuple[str, str, str | None, bool | None, float]],
) -> None:
    tools = RunningTools()
    alive: set[str] = set()
    for name, tool, call_id, ended, now_s in reports:
        if ended is None:
            tools.forget(name)
            alive.discard(name)
        else:
            tools.report(name, ToolReport(tool, call_id, ended), now_s)
            alive.add(name)
        assert len(tools) == len(alive)
        for other in ("c", "d"):
            wait = tools.wait(other, "what its answer called", 50.0)
            assert wait.since_s >= 50.0
            if other not in alive:
                assert wait == Wait("what its answer called", 50.0)
            assert wait.tool_ended == (other in alive and not tools.running(other))


# --- In a table ----------------------------------------------------------------------------------


def a_scene() -> tuple[ConversationTable, Pausing]:
    """Shells are done in a second; one of ten users is back, and late."""
    pausing = Pausing()
    for number in range(500):
        if number % 10:
            pausing.gaps.add(1800.0, "", ended=True)
        else:
            pausing.gaps.add(5000.0, "")
            pausing.gaps.add(1.0, "bash")
    return a_table(decoders=1, capacity_tokens=250, pausing=pausing), pausing


def called(table: ConversationTable, *, tool: str) -> None:
    """Have two histories call a tool at 100 s."""
    for name in ("a", "b"):
        start(table, name, 110)
        calls(table, name, tool, 100.0)


def test_who_waits_for_a_user_gives_up_its_room_before_who_waits_for_a_shell() -> None:
    table, _ = a_scene()
    for name, tool in (("shell", "bash"), ("user", "")):
        start(table, name, 110)
        calls(table, name, tool, 100.0)
        assert the(table, name).tool == tool
    assert table.bind("new", 100, 101.0) is not None
    assert paused(table) == {"user"}


def test_gaps_are_learned_by_tool() -> None:
    table, pausing = a_scene()
    start(table, "c", 110)
    for turn in range(40):
        calls(table, "c", "search", 1000.0 * turn)
        assert table.begin("c", 1000.0 * turn + 300) is not None
    assert pausing.gaps.chance(0.0, 30, tool="search") < 0.1
    assert pausing.gaps.chance(0.0, 30, tool="bash") > 0.8


def test_a_reported_tool_sharpens_what_its_answer_said() -> None:
    """An agent runs a shell to ask its user, so it is not away."""
    table, pausing = a_scene()
    called(table, tool="")
    table.tools.report("a", ToolReport("bash"), 104.0)
    assert table.bind("new", 100, 104.5) is not None
    assert paused(table) == {"b"}
    # Its turn comes: the report is forgotten, and the tool has had another gap.
    for _ in range(60):
        assert table.begin("a", 120.0) is not None
        assert len(table.tools) == 0
        calls(table, "a", "", 130.0)
        table.tools.report("a", ToolReport("slow"), 130.0)
    assert pausing.gaps.chance(0.0, 30, tool="slow") > 0.8


def test_whose_tool_is_done_is_expected_at_once() -> None:
    table, pausing = a_scene()
    called(table, tool="")
    table.tools.report("a", ToolReport("ask"), 100.0)
    table.tools.report("a", ToolReport("ask", ended=True), 700.0)
    assert table.bind("new", 100, 700.5) is not None
    assert paused(table) == {"b"}
    before = pausing.gaps.chance(0.0, 30)
    assert table.begin("a", 701.0) is not None
    assert pausing.gaps.chance(0.0, 30) == before
    assert pausing.resumes.chance(0.0, 30) > 0.75


def test_nothing_reported_is_left_of_a_conversation_that_ends() -> None:
    table, _ = a_scene()
    called(table, tool="bash")
    for name in ("a", "b"):
        table.tools.report(name, ToolReport("bash"), 100.0)
    table.release("a")
    assert len(table.tools) == 1
    assert [one.id for one in table.expire(1000.0)] == ["b"]
    assert len(table.tools) == 0


def test_a_report_is_of_the_history_that_called() -> None:
    tools = RunningTools()
    first, second = (History(name, 1, 0.0, 0.0) for name in ("first", "second"))
    first.tool, second.tool = "bash,read", "search"
    second.last_used_s = 9.0
    both = [first, second]
    assert tools.meant(both, ToolReport("read")) is first
    assert tools.meant(both, ToolReport("search")) is second
    # No answer called it, so it is the one used last.
    assert tools.meant(both, ToolReport("other")) is second
    first.running = (3,)
    assert tools.meant(both, ToolReport("read")) is second
    tools.report("first", ToolReport("search"), 1.0)
    assert tools.meant(both, ToolReport("search", ended=True)) is first
