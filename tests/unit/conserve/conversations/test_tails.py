"""The table recognises a conversation by its newest tail."""

from tests.unit.conserve.conversations.scene import OTHER_TAILS, TAILS, Turn, a_table, start, turn


def test_a_conversation_is_recognised_by_its_newest_tail_only() -> None:
    table = a_table()
    turn(table, "c", tails=TAILS)
    assert table.recognise([b"x" * 16, *TAILS]) == "c"
    turn(table, "c", tails=OTHER_TAILS)
    assert table.recognise(TAILS) is None
    assert table.recognise(OTHER_TAILS) == "c"
    table.release("c")
    assert table.recognise(OTHER_TAILS) is None


def test_of_twins_an_idle_one_is_recognised() -> None:
    """Equal prompts and greedy answers: equal tails, and yet two conversations."""
    table = a_table()
    for twin in "abc":
        turn(table, twin, tails=TAILS)
    recognised = []
    for _ in range(3):
        twin_id = table.recognise(TAILS)
        assert twin_id is not None
        recognised.append(twin_id)
        start(table, twin_id)
    assert sorted(recognised) == ["a", "b", "c"]
    Turn.last(table, "b").abandon(table)
    assert table.recognise(TAILS) == "b"
