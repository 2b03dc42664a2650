"""Decoders and prefillers come and go while conversations live."""

import copy

from conserve.histories.prefixes import mark
from conserve.placement import FullDisaggregationPlacement, Placement
from tests.unit.conserve.conversations.scene import (
    OTHER_TAILS,
    TAILS,
    Turn,
    a_table,
    binding,
    chain,
    held,
    start,
    stats,
    the,
    turn,
)


def test_a_conversation_outlives_its_decoder() -> None:
    table = a_table()
    turn(table, "c", 100, TAILS)
    assert table.remove_engine("d1") == ["c"]
    assert table.recognise(chain("c", TAILS), "c") == "c"
    assert table.begin("c", now_s=1) is None
    assert table.bind("c", 150, now_s=1) == Placement("d2", "p1")
    assert held(table) == {"d2": (150, 1)}
    conversation = the(table, "c")
    assert (conversation.moves, conversation.turns) == (1, 1)


def test_a_late_report_of_a_lost_decoder_is_refused() -> None:
    table = a_table()
    turn(table, "c", 100, TAILS)
    lost = start(table, "c")
    table.remove_engine("d1")
    assert not the(table, "c").running
    # Whether the conversation is nowhere, elsewhere, or where it was, but without its KV.
    assert not lost.advance(table, 900, OTHER_TAILS)
    start(table, "c", 150)
    assert not lost.advance(table, 900, OTHER_TAILS)
    assert lost.abandon(table, stats(900)) is None
    assert held(table) == {"d2": (150, 1)}
    table.remove_engine("d2")
    table.add_decoder("d1", 1000)
    again = start(table, "c", 160)
    assert again.decoder_id == lost.decoder_id
    assert not lost.advance(table, 900, OTHER_TAILS)
    conversation = the(table, "c")
    assert (conversation.turns, conversation.held_tokens) == (1, 160)
    assert conversation.tails == tuple(map(mark, TAILS))
    assert again.advance(table, 160)


def test_a_prefill_for_a_lost_decoder_is_not_queued_for_ever() -> None:
    table = a_table()
    start(table, "c", 100)
    table.remove_engine("d1")
    moved = start(table, "c", 100)
    moved.advance(table, 100)
    assert table.prefillers["p1"].queued_tokens == 0


def test_a_later_turn_is_prefilled_where_the_policy_says() -> None:
    table = a_table(policy=FullDisaggregationPlacement())
    turn(table, "c", 100)
    running = start(table, "c")
    assert table.prefill_later_turn(the(table, "c")) == "p1"
    # It counts with what is known: the history.
    assert table.prefillers["p1"].queued_tokens == 110
    # A second turn beside it takes its place in the queue.
    second = start(table, "c")
    assert table.prefill_later_turn(the(table, "c")) == "p1"
    assert table.prefillers["p1"].queued_tokens == 110
    table.prefilled(running.key)
    assert table.prefillers["p1"].queued_tokens == 0
    assert table.prefill_later_turn(the(table, "c")) == "p1"
    assert second.advance(table, 150)
    assert table.prefillers["p1"].queued_tokens == 0


def test_ttfet_outlives_a_decoder_that_was_away() -> None:
    table = a_table(decoders=1)
    assert table.bind("c", 100, 7.0, arrived_s=2.0) is not None
    running = Turn.last(table, "c")
    assert running.advance(table, 100)
    assert table.answered(running.key, 5.0) == 3.0
    account = [copy.copy(the(table, "c"))]
    account[0].asked_s = account[0].ttfet_s = None  # A decoder does not know them.
    table.remove_engine("d1")
    table.add_decoder("d1", 1000, account)
    assert binding(table, "c") == "d1"
    assert the(table, "c").ttfet_s == 3.0
    assert table.answered(running.key, 9.0) is None


def test_an_engine_that_reports_twice_keeps_its_state() -> None:
    table = a_table()
    start(table, "c", 100)
    table.add_prefiller("p1")
    # It is not to forget what it tells of: that is its own still.
    assert table.add_decoder("d1", 1000, [copy.copy(the(table, "c"))]) == []
    assert table.prefillers["p1"].queued_tokens == 100
    assert held(table)["d1"] == (100, 1)
