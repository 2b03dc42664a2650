"""Idle conversations end, and the table keeps nothing of them."""

import copy

from conserve.conversations import ConversationTable
from conserve.conversations.ledger import RECENT_S, Activity
from conserve.placement import ConversationPlacement
from tests.unit.conserve.conversations.scene import (
    IDLE_S,
    TAILS,
    TURN_S,
    a_table,
    chain,
    held,
    listed,
    start,
    the,
    turn,
)


def test_idle_ones_end_the_longest_unused_first() -> None:
    table = a_table()
    for now_s, history_id in enumerate("abc"):
        turn(table, history_id, now_s=now_s)
    turn(table, "a", now_s=10)
    assert table.expire(1 + IDLE_S - 0.01) == []
    assert [c.id for c in table.expire(2 + IDLE_S)] == ["b", "c"]
    assert table.expire(9 + IDLE_S) == []
    turn(table, "d", now_s=10.5)
    assert [c.id for c in table.expire(11 + IDLE_S)] == ["a", "d"]
    assert held(table) == {"d1": (0, 0), "d2": (0, 0)}


def test_another_idle_time_goes_for_those_that_live() -> None:
    table = a_table()
    turn(table, "before", now_s=0)
    table.end_when_idle_for(IDLE_S / 2)
    turn(table, "after", now_s=1)
    assert table.expire(IDLE_S / 2 - 0.01) == []
    assert [c.id for c in table.expire(1 + IDLE_S / 2)] == ["before", "after"]
    turn(table, "longer", now_s=2)
    table.end_when_idle_for(2 * IDLE_S)
    assert table.expire(2 + 2 * IDLE_S - 0.01) == []
    assert [c.id for c in table.expire(2 + 2 * IDLE_S)] == ["longer"]


def test_a_turn_longer_than_the_idle_time_is_not_ended() -> None:
    table = a_table()
    long = start(table, "long", now_s=0)
    lost = start(table, "lost", now_s=0)
    assert table.expire(IDLE_S) == []
    assert table.expire(IDLE_S + TURN_S - 0.01) == []
    assert long.advance(table, 100, now_s=IDLE_S + TURN_S - 0.01)
    # A turn of which nothing is heard for that long is lost.
    assert [c.id for c in table.expire(IDLE_S + TURN_S)] == ["lost"]
    assert not lost.advance(table, 100)
    assert table.expire(2 * IDLE_S + TURN_S - 0.02) == []
    assert [c.id for c in table.expire(2 * IDLE_S + TURN_S)] == ["long"]


def test_one_whose_turn_was_lost_with_its_decoder_is_not_spared() -> None:
    table = a_table()
    turn(table, "c", tails=TAILS)
    start(table, "c", now_s=0)
    assert table.expire(IDLE_S) == []
    table.remove_engine("d1")
    assert [c.id for c in table.expire(IDLE_S)] == ["c"]
    assert table.recognise(chain("c", TAILS), "c") is None


def test_an_idle_time_shorter_than_a_period_is_kept_to() -> None:
    table = ConversationTable(ConversationPlacement(), 0.1)
    table.add_decoder("d1", 1000)
    turn(table, "c", now_s=7.2)
    assert table.expire(7.29) == []
    assert [c.id for c in table.expire(7.3)] == ["c"]


def test_the_table_does_not_grow_by_what_has_ended() -> None:
    table = a_table()
    turn(table, "stays", now_s=1)
    for i in range(5000):
        turn(table, f"c{i}", now_s=i / 100)
        table.release(f"c{i}")
        # One period's may come on top until its turn comes.
        assert table._idleness._listed <= 1200
    assert "stays" in listed(table)
    assert table._idleness._listed == len(listed(table))
    assert [c.id for c in table.expire(50 + IDLE_S)] == ["stays"]
    assert table._idleness._listed == len(table._idleness._looks) == 0


def test_the_table_does_not_grow_by_decoders_that_come_and_go() -> None:
    table = a_table()
    turn(table, "c", now_s=1)
    for _ in range(10):
        account = [copy.copy(the(table, "c"))]
        table.remove_engine("d1")
        table.add_decoder("d1", 1000, account)
    assert listed(table) == ["c"]
    assert [c.id for c in table.expire(1 + IDLE_S)] == ["c"]


def test_nothing_is_kept_of_those_that_were_idle_for_long() -> None:
    activity = Activity()
    for number in range(1000):
        activity.idle(f"c{number}", float(number))
    assert len(activity._idle_s) == RECENT_S
    activity.idle("c980", 999.0)
    # Since less than half a minute: c986 to c999, and the one that became idle anew.
    assert activity.acting(1015.0) == 15
