"""Turns that are reported twice or late, and turns that do not complete."""

from typing import Any

from conserve.turn import TurnStats
from tests.unit.conserve.conversations.scene import (
    OTHER_TAILS,
    TAILS,
    a_table,
    chain,
    held,
    start,
    stats,
    the,
    turn,
)

# --- Reports that come twice, or late ------------------------------------------------------------


def test_a_turn_that_is_reported_twice_counts_once() -> None:
    """Reports are repeated if the table's process was lost before it answered."""
    table = a_table()
    first = turn(table, "c", 100, TAILS)
    running = start(table, "c")
    assert not first.advance(table, 700, OTHER_TAILS)
    assert first.abandon(table, stats(700)) is None
    conversation = the(table, "c")
    assert (conversation.turns, conversation.held_tokens) == (1, 110)
    assert conversation.running
    assert running.advance(table, 200)
    assert table.recognise(chain("c", TAILS), "c") == "c"
    assert table.recognise(chain("c", OTHER_TAILS), "c") is None
    assert held(table)["d1"] == (210, 1)


def test_a_decoder_holds_what_is_live_and_bound_to_it() -> None:
    table = a_table()
    first = turn(table, "c")
    assert table.holds(first.key, "d1")
    assert not table.holds(first.key, "d2")
    assert not table.holds(first.key._replace(incarnation=first.incarnation + 1), "d1")
    table.remove_engine("d1")
    assert not table.holds(first.key, "d1")
    start(table, "c")
    assert table.holds(first.key, "d2")
    table.release("c")
    assert not table.holds(first.key, "d2")


def test_a_late_end_of_an_earlier_incarnation_changes_nothing() -> None:
    table = a_table()
    old = start(table, "c", 100)
    table.release("c")
    new = start(table, "c", 300)
    assert the(table, "c").incarnation != old.incarnation
    assert not old.advance(table, 700, TAILS)
    assert old.abandon(table) is None
    table.prefilled(old.key)
    assert held(table)["d1"] == (300, 1)
    assert table.prefillers["p1"].queued_tokens == 300
    assert table.reasoning == 1
    assert table.recognise(chain("c", TAILS), "c") is None
    assert new.advance(table, 300)


# --- Turns that do not complete ------------------------------------------------------------------


def test_a_first_turn_cut_in_an_engine_keeps_its_tokens() -> None:
    """The client left, but the KV is there when it asks again."""
    table = a_table()
    assert start(table, "c", 100).abandon(table, stats(100, 7)) is None
    conversation = the(table, "c")
    assert (conversation.turns, conversation.held_tokens) == (0, 107)
    assert not conversation.running
    assert table.begin("c", now_s=1) is conversation


def test_a_promise_that_never_arrived_is_no_occupancy() -> None:
    """It was bound again after its decoder was lost, and its client left before the new one
    had it.
    """
    table = a_table()
    turn(table, "c", 100, TAILS)
    table.remove_engine("d1")
    moved = start(table, "c", 150)
    assert held(table)["d2"] == (150, 1)
    assert moved.abandon(table) is None
    assert held(table)["d2"] == (0, 0)
    assert table.begin("c", now_s=1) is None
    assert table.bind("c", 160, now_s=2) is not None


# --- Records -------------------------------------------------------------------------------------


def test_a_record_takes_over_all_that_another_has_set() -> None:
    fields: dict[str, Any] = {name: name for name in TurnStats.__struct_fields__}
    whole, merged = TurnStats(**fields), TurnStats()
    merged.merge(whole)
    merged.merge(TurnStats())
    assert merged == whole
