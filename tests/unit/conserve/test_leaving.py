"""Engines that leave get nothing new, and their histories end there or move."""

from conserve.conversations import ConversationTable
from tests.unit.conserve.conversations.scene import Turn, a_table, start


def bind(table: ConversationTable, name: str) -> str:
    return start(table, name).decoder_id


def finish(table: ConversationTable, name: str) -> None:
    assert Turn.last(table, name).advance(table, 100)


def test_a_decoder_that_leaves_keeps_its_conversations_and_gets_no_new_one() -> None:
    table = a_table(prefillers=2)
    assert bind(table, "old") == "d1"
    finish(table, "old")
    table.leave("d1")
    assert {bind(table, f"new{number}") for number in range(5)} == {"d2"}
    again = table.begin("old", 1)
    assert again is not None
    assert again.home == "d1"
    assert [one.id for one in table.accepting_decoders] == ["d2"]


def test_a_prefiller_that_leaves_gets_no_prompt() -> None:
    table = a_table(prefillers=2)
    table.leave("p1")
    for number in range(3):
        placement = table.bind(f"c{number}", 100, 0)
        assert placement is not None
        assert placement.prefiller_id == "p2"


def test_eviction_spares_a_running_turn_and_moves_the_conversation_after_it() -> None:
    table = a_table(prefillers=2)
    assert bind(table, "idle") == "d1"
    finish(table, "idle")
    assert bind(table, "other") == "d2"
    assert bind(table, "busy") == "d2"
    finish(table, "other")
    for name in ("d1", "d2"):
        table.add_decoder(name, 1000)
    table.add_decoder("d3", 1000)
    table.leave("d2")
    assert table.evict("d2") == ["other"]
    held = table.decoders["d2"]
    assert (held.conversations, held.held_tokens) == (1, 100)
    finish(table, "busy")
    # However fast its next turn follows, it is placed anew, and counts as moved.
    assert table.begin("busy", 1) is None
    assert (held.conversations, held.held_tokens) == (0, 0)
    assert table.bind("busy", 150, 1) is not None
    moved = table.get("busy")
    assert moved is not None
    assert (moved.moves, moved.home) == (1, "d3")
    # Others are left alone.
    kept = table.begin("idle", 1)
    assert kept is not None
    assert (kept.home, kept.moves) == ("d1", 0)


def test_an_engine_of_the_same_id_starts_afresh() -> None:
    table = a_table(prefillers=2)
    table.leave("d1")
    table.evict("d1")
    table.remove_engine("d1")
    table.add_decoder("d1", 1000)
    table.leave("d2")
    assert bind(table, "c") == "d1"
    finish(table, "c")
    assert table.begin("c", 1) is not None
