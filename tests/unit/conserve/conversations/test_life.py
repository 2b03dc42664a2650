"""A conversation's life in the table, from binding to release."""

import pytest

from conserve.history import TurnKey
from conserve.placement import Placement
from tests.unit.conserve.conversations.scene import (
    OTHER_TAILS,
    TAILS,
    Turn,
    a_table,
    binding,
    held,
    start,
    stats,
    the,
    turn,
)


def test_a_whole_life() -> None:
    table = a_table()
    assert table.bind("c", 300, now_s=1) == Placement("d1", "p1")
    conversation = the(table, "c")
    assert conversation.running
    # Promised tokens count before the first one has arrived.
    assert held(table) == {"d1": (300, 1), "d2": (0, 0)}
    assert table.prefillers["p1"].queued_tokens == 300

    table.prefilled(conversation.newest_turn)
    assert table.prefillers["p1"].queued_tokens == 0

    assert Turn.last(table, "c").advance(table, 300, TAILS, now_s=2)
    assert not conversation.running
    assert (conversation.turns, conversation.held_tokens) == (1, 310)
    assert conversation.last_turn == stats(300)

    assert table.begin("c", now_s=3) is conversation
    assert conversation.running
    assert Turn.last(table, "c").advance(table, 400, OTHER_TAILS, now_s=4)
    assert held(table) == {"d1": (410, 1), "d2": (0, 0)}
    assert (conversation.created_s, conversation.last_used_s) == (1, 4)

    assert table.release("c") is conversation
    assert held(table) == {"d1": (0, 0), "d2": (0, 0)}
    assert "c" not in table
    assert len(table) == table.reasoning == 0


def test_a_bound_conversation_is_not_bound_again() -> None:
    table = a_table()
    turn(table, "c")
    with pytest.raises(ValueError, match="'c' is bound to d1"):
        table.bind("c", 100, now_s=1)
    assert held(table)["d1"] == (110, 1)


def test_unknown_conversations() -> None:
    table = a_table()
    assert table.get("c") is None
    assert table.begin("c", now_s=0) is None
    assert table.release("c") is None
    assert not Turn("c", 1, 1, "d1").advance(table, 100)
    assert Turn("c", 1, 1, "d1").abandon(table) is None
    assert not table.holds(TurnKey("c", 1, 1), "d1")
    table.prefilled(TurnKey("c", 1, 1))
    assert len(table) == 0


def test_without_room_nothing_is_changed() -> None:
    table = a_table(decoders=1)
    turn(table, "big", 900)
    assert table.bind("c", 200, now_s=0) is None
    assert "c" not in table
    assert held(table) == {"d1": (910, 1)}
    assert table.prefillers["p1"].queued_tokens == 0


def test_twenty_arriving_at_once_spread_by_promised_tokens() -> None:
    """Routers report arrival later, so promised tokens have to count."""
    table = a_table(decoders=4, capacity_tokens=100_000)
    lengths = [1000 + 37 * i for i in range(20)]
    for i, length in enumerate(lengths):
        table.bind(f"c{i}", length, now_s=0)
    tokens = [t for t, _ in held(table).values()]
    assert sum(tokens) == sum(lengths)
    assert max(tokens) - min(tokens) <= max(lengths)
    assert {conversations for _, conversations in held(table).values()} == {5}


def test_arrivals_go_to_the_emptier_decoder_until_it_is_level() -> None:
    table = a_table(decoders=2, capacity_tokens=100_000)
    turn(table, "long", 10_000)
    assert binding(table, "long") == "d1"
    for i in range(12):
        table.bind(f"c{i}", 1000, now_s=0)
    assert [binding(table, f"c{i}") for i in range(11)] == ["d2"] * 11
    assert binding(table, "c11") == "d1"


def test_concurrent_turns_of_one_conversation() -> None:
    table = a_table()
    turn(table, "c")
    first, second = start(table, "c"), start(table, "c")
    assert table.reasoning == 1
    first.advance(table, 200)
    assert the(table, "c").running
    second.advance(table, 210)
    assert not the(table, "c").running
    assert the(table, "c").turns == 3


def test_those_that_live_are_listed_with_when_they_were_used() -> None:
    table = a_table()
    for now_s, history_id in enumerate("abca"):
        turn(table, history_id, now_s=now_s)
    assert {c.id: c.last_used_s for c in table.live()} == {"a": 3, "b": 1, "c": 2}
    table.release("b")
    assert {c.id for c in table.live()} == {"a", "c"}
