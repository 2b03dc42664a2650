"""The table recognises a conversation by its newest tail."""

from conserve import identity
from tests.unit.conserve.conversations.scene import (
    OTHER_TAILS,
    TAILS,
    Turn,
    a_table,
    chain,
    start,
    turn,
)


def test_a_conversation_is_recognised_by_its_newest_tail_only() -> None:
    table = a_table()
    turn(table, "c", tails=TAILS)
    assert table.recognise(chain("c", [b"x" * 16, *TAILS]), "c") == "c"
    turn(table, "c", tails=OTHER_TAILS)
    assert table.recognise(chain("c", TAILS), "c") is None
    assert table.recognise(chain("c", OTHER_TAILS), "c") == "c"
    table.release("c")
    assert table.recognise(chain("c", OTHER_TAILS), "c") is None


def test_of_twins_an_idle_one_is_recognised() -> None:
    """Equal prompts and greedy answers give equal tails of two conversations."""
    table = a_table()
    twins = [identity.new_id() for _ in range(3)]
    said = chain("twin", TAILS)
    for twin in twins:
        turn(table, twin, tails=TAILS, like="twin")
    recognised = []
    for _ in range(3):
        twin_id = table.recognise(said)
        assert twin_id is not None
        recognised.append(twin_id)
        start(table, twin_id)
    assert sorted(recognised) == sorted(twins)
    assert table.recognise(said) is None
    Turn.last(table, twins[1]).abandon(table)
    assert table.recognise(said) == twins[1]


def test_nobody_is_given_a_conversation_that_somebody_has_named() -> None:
    table = a_table()
    said = chain("like", TAILS)
    unnamed = identity.new_id()
    for one in ("c", "d", unnamed):
        turn(table, one, tails=TAILS, like="like")
        # Alone, and beside others of the same root.
        assert table.recognise(said, one) == one
        assert table.recognise(said) == (unnamed if one == unnamed else None)
        assert table.recognise(said, "e") is None
        assert table.recognise(said, identity.new_id()) is None
    assert table.recognise(said, "c") == "c"
    assert table.recognise(said, "d") == "d"


def test_a_named_conversation_has_several_histories() -> None:
    table = a_table()
    second = identity.further("c", 2)
    turn(table, "c", tails=TAILS)
    turn(table, second, tails=OTHER_TAILS)
    turn(table, "cc", tails=OTHER_TAILS, like=second)
    assert [one.id for one in table.histories("c")] == ["c", second]
    assert table.recognise(chain("c", TAILS), "c") == "c"
    assert table.recognise(chain(second, OTHER_TAILS), "c") == second
    table.release("c")
    assert [one.id for one in table.histories("c")] == [second]
    assert table.recognise(chain(second, OTHER_TAILS), "c") == second
    table.release(second)
    assert table.histories("c") == []


def test_any_choice_of_an_answer_can_be_continued() -> None:
    table = a_table()
    for like in ("alone", "twin", "twin"):
        id = identity.new_id()
        turn(table, id, tails=(*TAILS, *OTHER_TAILS), like=like)
        for tail in (TAILS, OTHER_TAILS):
            assert table.recognise(chain(like, tail)) is not None
            assert table.recognise(chain(like, tail), id) == id


def test_all_decoders_are_heard_on_which_the_turn_before_may_just_have_ended() -> None:
    """Any of several equal conversations may be the one that a turn continues."""
    table = a_table(decoders=2, capacity_tokens=1_000_000)
    twins = [identity.new_id() for _ in range(100)]
    for twin in twins:
        turn(table, twin, tails=TAILS, like="twin")
    third = chain("twin", [b"y" * 16, *TAILS])
    assert table.to_be_heard(third, None) == set()
    begun = []
    for _ in twins:
        twin_id = table.recognise(chain("twin", TAILS))
        assert twin_id is not None
        begun.append(start(table, twin_id))
    assert table.to_be_heard(third, None) == {"d1", "d2"}
    # All but the two that are oldest have ended, each with an answer of its own.
    last = {one.decoder_id: one for one in reversed(begun)}
    for number, one in enumerate(begun):
        if one not in last.values():
            assert one.advance(table, 200, tails=(number.to_bytes(16),))
    assert table.to_be_heard(third, None) == {"d1", "d2"}
    assert table.to_be_heard(third, "named") == set()
    assert last["d1"].advance(table, 200, tails=(b"y" * 16,))
    assert table.to_be_heard(third, None) == {"d2"}
    assert table.recognise(third) == last["d1"].history_id
