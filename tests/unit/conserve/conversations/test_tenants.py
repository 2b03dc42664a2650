"""Tenants' usage, counted where conversations change."""

import copy

from conserve.conversations import ConversationTable
from conserve.placement import ConversationPlacement
from tests.unit.conserve.conversations.scene import IDLE_S, a_table, start, the, turn


def has(table: ConversationTable, tenant: str) -> tuple[int, int, int]:
    usage = table.usage.tenant(tenant)
    return usage.turns, usage.held_tokens, usage.conversations


def test_a_turn_a_promise_and_a_conversation_count_until_they_end() -> None:
    table = a_table()
    begun = start(table, "one\ta", 100)
    second = start(table, "one\ta")
    turn(table, "two\ta", 50)
    assert has(table, "one") == (2, 100, 1)
    assert has(table, "two") == (0, 60, 1)
    begun.advance(table, 200)
    assert has(table, "one") == (1, 210, 1)
    second.abandon(table)
    assert has(table, "one") == (0, 210, 1)
    start(table, "one\ta")
    table.release("one\ta")
    assert has(table, "one") == (0, 0, 0)
    assert has(table, "two") == (0, 60, 1)


def test_a_table_is_told_by_decoders_whose_they_are() -> None:
    table = a_table()
    turn(table, "one\ta", 50, now_s=90)
    start(table, "one\ta")
    held = [copy.copy(the(table, "one\ta"))]
    successor = ConversationTable(ConversationPlacement(), IDLE_S, first_id=1000)
    successor.add_decoder("d1", 1000, held)
    assert has(successor, "one") == (1, 60, 1)
    assert successor.usage.tenant("one").begun_lately(100) == 1
    # Back after it was thought lost: nothing is counted twice.
    account = [copy.copy(the(successor, "one\ta"))]
    successor.remove_engine("d1")
    assert has(successor, "one") == (0, 0, 1)
    successor.add_decoder("d1", 1000, account)
    assert has(successor, "one") == (1, 60, 1)
    assert successor.usage.tenant("one").begun_lately(100) == 1
