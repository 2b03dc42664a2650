"""Paused histories that are brought back to their decoder before their turns come."""

import pytest

from conserve.conversations import ConversationTable
from conserve.hints import Hints
from conserve.history import State
from conserve.pausing.prefetch import Prefetches
from conserve.placement import NOTHING_SHARED
from conserve.turn import TurnStats
from conserve.why import noted, why_slow
from tests.unit.conserve.conversations.scene import Turn, start, the
from tests.unit.conserve.pausing.scene import (
    NOW_S,
    a_parking_table,
    ends,
    idle,
    memory_of,
    parking,
    paused,
)


def gone(table: ConversationTable, name: str, tokens: int = 600, others_tokens: int = 900) -> None:
    """A history that is paused and parked, and of which its engine has less than half."""
    assert parking(table, name, tokens)
    memory_of(table).pause(the(table, name), "room")
    idle(table, "over", others_tokens, NOW_S)
    table.release("over")


def a_table_without_a(others_tokens: int = 900) -> ConversationTable:
    table = a_parking_table()
    table.notices.add("d1", 1)
    gone(table, "a", 600, others_tokens)
    return table


def told(table: ConversationTable, heard: int = 0) -> tuple[str, ...]:
    notice = table.notices.due("d1", heard)
    assert notice is not None
    return notice.prefetch


def brings_back(table: ConversationTable, name: str = "a") -> bool:
    table.prefetch(the(table, name), NOW_S)
    return memory_of(table).paused_on(name) is None and name in memory_of(table).prefetches._open


def outcomes(table: ConversationTable) -> dict[str, int]:
    return dict(memory_of(table).prefetches.outcomes)


def test_a_history_is_there_when_its_turn_comes() -> None:
    table = a_table_without_a()
    assert brings_back(table)
    assert (paused(table), the(table, "a").state) == (set(), State.BOUND)
    assert (table.decoders["d1"].held_tokens, told(table)) == (600, ("a",))
    assert memory_of(table).restores == {"reloaded": 1}
    table.prefetched("a", 590, NOW_S + 1)
    assert memory_of(table).found("a", NOTHING_SHARED).left_tokens == 600
    history = table.begin("a", NOW_S + 1.4)
    assert history is not None
    record = table.record(Turn.last(table, "a").id)
    assert record is not None
    assert record.ahead_s == pytest.approx(0.4)
    assert (noted(record), why_slow(record)) == ("brought back 0.4 s before the turn", None)
    assert outcomes(table) == {"used": 1}
    # Nothing of it is left for the turn after that.
    ends(table, "a", TurnStats(620, 10, 600, 0), NOW_S + 2)
    assert table.begin("a", NOW_S + 3) is not None
    assert outcomes(table) == {"used": 1}


def test_a_turn_that_comes_while_its_kv_is_loaded_is_late() -> None:
    table = a_table_without_a()
    assert brings_back(table)
    assert table.begin("a", NOW_S + 0.1) is not None
    assert outcomes(table) == {"late": 1}
    record = table.record(Turn.last(table, "a").id)
    assert record is not None
    assert (record.ahead_s, noted(record)) == (None, None)
    table.prefetched("a", 590, NOW_S + 1)
    table.prefetch_due(NOW_S + 60, any_waits=False)
    assert (paused(table), outcomes(table)) == (set(), {"late": 1})


def test_a_turn_that_does_not_come_gives_its_room_back() -> None:
    table = a_table_without_a()
    assert brings_back(table)
    table.prefetched("a", 590, NOW_S + 1)
    table.prefetch_due(NOW_S + 5, any_waits=False)
    assert paused(table) == set()
    table.prefetch_due(NOW_S + 5.1, any_waits=True)
    assert (paused(table), table.decoders["d1"].held_tokens) == ({"a"}, 0)
    assert outcomes(table) == {"dropped": 1}
    assert memory_of(table).pauses["prefetch"] == 1
    # Its decoder need not load it any more, if it has not heard of that yet.
    assert told(table) == ()


@pytest.mark.parametrize(("tokens", "stays"), [(299, False), (300, True)])
def test_a_load_that_finds_too_little_gives_the_room_back(tokens: int, stays: bool) -> None:
    table = a_table_without_a()
    assert brings_back(table)
    table.prefetched("a", tokens, NOW_S + 1)
    assert paused(table) == (set() if stays else {"a"})
    assert outcomes(table) == ({} if stays else {"dropped": 1})


def test_the_room_is_there_for_others_at_any_time() -> None:
    for loads in (True, False):
        table = a_table_without_a(others_tokens=1000)
        assert brings_back(table)
        if not loads:
            table.prefetched("a", 590, NOW_S + 1)
        start(table, "runs", 10, NOW_S + 1)
        assert table.bind("new", 900, NOW_S + 1) is not None
        assert (paused(table), outcomes(table)) == ({"a"}, {"dropped": 1})
        assert memory_of(table).pauses["room"] == 2


def test_nothing_is_brought_back_beyond_the_room_that_is_free() -> None:
    table = a_table_without_a()
    idle(table, "b", 401, NOW_S)
    assert not brings_back(table)
    table.release("b")
    idle(table, "b", 400, NOW_S)
    assert brings_back(table)


def test_nothing_is_brought_back_over_what_is_live_in_the_engine() -> None:
    """The engine evicts what was used least lately, whether its history lives or has ended."""
    for live_first in (True, False):
        table = a_parking_table()
        gone(table, "a")
        for name in ("live", "ended") if live_first else ("ended", "live"):
            idle(table, name, 300 if name == "live" else 690, NOW_S)
        table.release("ended")
        assert brings_back(table) != live_first
    # A live one that is on another decoder by now is not.
    table = a_parking_table()
    gone(table, "a")
    assert parking(table, "moved", 900)
    memory_of(table).pause(the(table, "moved"), "room")
    assert brings_back(table)


def test_an_engine_loads_one_history_at_a_time() -> None:
    table = a_parking_table()
    gone(table, "b", 510)
    gone(table, "a", 510)
    table.decoders["d1"].capacity_tokens = 2000
    assert brings_back(table, "b")
    assert not brings_back(table)
    table.prefetched("b", 500, NOW_S + 1)
    assert brings_back(table)


def test_what_its_engine_has_or_host_memory_has_not_is_not_brought_back() -> None:
    table = a_parking_table()
    assert parking(table, "a", 600)
    memory_of(table).pause(the(table, "a"), "room")
    for others_tokens, comes in ((704, False), (706, True)):
        idle(table, "over", others_tokens, NOW_S)
        table.release("over")
        assert (memory_of(table).brings_back_to(the(table, "a")) == "d1") == comes
    idle(table, "over", 900, NOW_S)
    table.release("over")
    memory = memory_of(table)
    memory._host.drop(next(iter(memory._host)))
    assert not brings_back(table)
    memory.parked(the(table, "a"), 299)
    assert not brings_back(table)
    memory.parked(the(table, "a"), 300)
    assert memory.brings_back_to(the(table, "a")) == "d1"
    table.leave("d1")
    assert not brings_back(table)
    memory.set_host_tokens(0)
    assert not brings_back(table)
    # Neither is one that is not paused.
    other = a_parking_table()
    assert parking(other, "a", 600)
    assert not brings_back(other)


def test_what_was_brought_back_may_end_or_lose_its_decoder() -> None:
    for ends_so in (lambda table: table.release("a"), lambda table: table.remove_engine("d1")):
        table = a_table_without_a()
        assert brings_back(table)
        ends_so(table)
        assert outcomes(table) == {"dropped": 1}
        table.prefetched("a", 590, NOW_S + 1)
        table.prefetch_due(NOW_S + 60, any_waits=False)
        assert outcomes(table) == {"dropped": 1}


def test_what_was_brought_back_to_a_decoder_that_is_emptied_is_dropped() -> None:
    table = a_table_without_a()
    assert brings_back(table)
    table.evict("d1")
    table.prefetch_due(NOW_S + 60, any_waits=False)
    assert (the(table, "a").state, outcomes(table)) == (State.UNBOUND, {"dropped": 1})


def expects(table: ConversationTable, expected_s: float | None, now_s: float = NOW_S) -> None:
    """End a turn of a history whose client says when the next one comes; it is paused then."""
    start(table, "a", 600, now_s)
    assert table.park(the(table, "a"))
    the(table, "a").hints = Hints(expected_resume_s=expected_s)
    ends(table, "a", TurnStats(590, 10, 0, 0), now_s)
    memory_of(table).pause(the(table, "a"), "room")
    idle(table, "over", 900, now_s)
    table.release("over")


def test_a_history_is_brought_back_before_its_client_expects_to_go_on() -> None:
    table = a_parking_table()
    expects(table, 60.0)
    table.prefetch_due(NOW_S + 56.9, any_waits=False)
    assert paused(table) == {"a"}
    table.prefetch_due(NOW_S + 57.0, any_waits=False)
    assert paused(table) == set()
    # It stays until some seconds after it was due.
    table.prefetched("a", 590, NOW_S + 58)
    table.prefetch_due(NOW_S + 65, any_waits=False)
    assert paused(table) == set()
    table.prefetch_due(NOW_S + 65.1, any_waits=False)
    assert paused(table) == {"a"}


def test_nothing_is_brought_back_while_turns_wait_or_after_another_turn() -> None:
    waiting = a_parking_table()
    expects(waiting, 60.0)
    waiting.prefetch_due(NOW_S + 58, any_waits=True)
    waiting.prefetch_due(NOW_S + 59, any_waits=False)
    assert paused(waiting) == {"a"}
    again = a_parking_table()
    expects(again, 60.0)
    expects(again, 600.0, NOW_S + 30)
    again.prefetch_due(NOW_S + 58, any_waits=False)
    assert paused(again) == {"a"}
    again.prefetch_due(NOW_S + 628, any_waits=False)
    assert paused(again) == set()
    silent = a_parking_table()
    expects(silent, None)
    silent.prefetch_due(NOW_S + 1e6, any_waits=False)
    assert paused(silent) == {"a"}


def test_only_so_many_turns_are_expected() -> None:
    prefetches = Prefetches()
    for number in range(65_537):
        prefetches.expect(f"h{number}", 100.0)
    assert len(prefetches.due(100.0)) == 65_536
    assert prefetches.due(100.0) == []


def test_a_decoder_is_told_once_what_to_load() -> None:
    table = a_table_without_a()
    assert brings_back(table)
    number = table.notices.due("d1", 0).number  # type: ignore[union-attr]
    assert told(table, number - 1) == ("a",)
    assert told(table, number) == ()
    table.notices.confirm("d1", number)
    assert told(table) == ()
    table.notices.prefetch("unknown", "a")
