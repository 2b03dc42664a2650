"""A conversation's life in the table, from binding to release."""

import pytest

from conserve.placement import Placement
from conserve.turn import TurnKey
from tests.unit.conserve.conversations.scene import (
    OTHER_TAILS,
    TAILS,
    Turn,
    a_table,
    held,
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
