"""A decoder's own account of what it holds."""

import pytest

from conserve import identity
from conserve.histories.prefixes import mark
from conserve.history import History
from conserve.holdings import Holdings
from conserve.turn import TurnKey, TurnStats

STATS = TurnStats(100, 20, 0, 96)
LATER = TurnStats(150, 30, 120, 0)
TAILS = (b"t" * 16,)
MARKS = tuple(map(mark, TAILS))


def the_only(holdings: Holdings) -> History:
    (held,) = holdings.all()
    return held


def after_one_turn() -> Holdings:
    holdings = Holdings()
    holdings.begin(TurnKey("c", 7, 1), look_up=True)
    holdings.finish(TurnKey("c", 7, 1), STATS, TAILS, completed=True)
    return holdings


def test_a_completed_turn_leaves_tokens_and_tails() -> None:
    held = the_only(after_one_turn())
    assert held.held_tokens == 120
    assert held.last_turn == STATS
    assert held.tails == MARKS
    assert held.turns == 1
    assert held.finished == 1
    assert not held.running
    assert held.created_s <= held.last_used_s


@pytest.mark.parametrize(
    ("stats", "tails", "left"),
    [
        (LATER, (b"u" * 16,), (180, 2, (mark(b"u" * 16),))),
        # It was cut: its tokens are there, and no turn.
        (LATER, (), (180, 1, MARKS)),
        # It was refused.
        (None, (), (120, 1, MARKS)),
    ],
)
def test_a_later_turn_replaces_what_it_leaves(
    stats: TurnStats | None, tails: tuple[bytes, ...], left: tuple[int, int, tuple[bytes, ...]]
) -> None:
    holdings = after_one_turn()
    holdings.begin(TurnKey("c", 7, 2))
    assert (the_only(holdings).incarnation, the_only(holdings).running) == (7, (2,))
    holdings.finish(TurnKey("c", 7, 2), stats, tails, completed=bool(tails))
    held = the_only(holdings)
    assert (held.held_tokens, held.turns, held.tails) == left
    assert not held.running


def test_the_latest_turn_that_ended_is_told() -> None:
    holdings = after_one_turn()
    holdings.begin(TurnKey("c", 7, 2))
    holdings.begin(TurnKey("c", 7, 3))
    assert (the_only(holdings).finished, the_only(holdings).running) == (1, (2, 3))
    holdings.finish(TurnKey("c", 7, 3), None, (), completed=False)
    holdings.finish(TurnKey("c", 7, 2), LATER, (), completed=True)
    assert the_only(holdings).finished == 3


def test_a_refused_first_turn_leaves_nothing() -> None:
    holdings = Holdings()
    holdings.begin(TurnKey("c", 7, 1))
    holdings.finish(TurnKey("c", 7, 1), None, (), completed=False)
    assert holdings.all() == []


def test_a_refused_first_turn_does_not_end_a_second_beside_it() -> None:
    holdings = Holdings()
    holdings.begin(TurnKey("c", 7, 1))
    holdings.begin(TurnKey("c", 7, 2))
    holdings.finish(TurnKey("c", 7, 1), None, (), completed=False)
    assert the_only(holdings).running == (2,)


def test_turns_of_an_earlier_incarnation_no_longer_count() -> None:
    holdings = after_one_turn()
    holdings.begin(TurnKey("c", 7, 2))
    holdings.begin(TurnKey("c", 9, 3))
    held = the_only(holdings)
    assert (held.incarnation, held.running, held.held_tokens, held.tails) == (9, (3,), 0, ())
    holdings.finish(TurnKey("c", 7, 2), LATER, TAILS, completed=True)
    held = the_only(holdings)
    assert (held.running, held.held_tokens, held.turns) == ((3,), 0, 0)


def test_dropped_conversations_are_gone() -> None:
    holdings = after_one_turn()
    holdings.drop("c", 6)  # An earlier conversation of the same id.
    assert len(holdings.all()) == 1
    holdings.drop("c", 7)
    holdings.drop("c", 7)
    holdings.finish(TurnKey("c", 7, 1), LATER, TAILS, completed=True)
    assert holdings.all() == []


def test_the_account_given_away_is_a_copy() -> None:
    holdings = after_one_turn()
    given = the_only(holdings)
    holdings.begin(TurnKey("c", 7, 2))
    given.held_tokens = 5
    assert given.running == ()
    assert the_only(holdings).held_tokens == 120


def test_the_first_turns_length_here_is_remembered_until_the_conversation_ends() -> None:
    holdings = Holdings()
    holdings.begin(TurnKey("c", 7, 1), look_up=True)
    assert holdings.stored_tokens("c") is None
    holdings.finish(TurnKey("c", 7, 1), STATS, TAILS, completed=True)
    holdings.begin(TurnKey("c", 7, 2))
    holdings.finish(TurnKey("c", 7, 2), LATER, TAILS, completed=True)
    assert holdings.stored_tokens("c") == STATS.prompt_tokens
    holdings.begin(TurnKey("c", 9, 3), look_up=True)
    assert holdings.stored_tokens("c") is None
    holdings.finish(TurnKey("c", 9, 3), LATER, TAILS, completed=True)
    assert holdings.stored_tokens("c") == LATER.prompt_tokens
    holdings.drop("c", 9)
    assert holdings.stored_tokens("c") is None


def test_where_lmcache_can_have_nothing_it_has_nothing_until_something_is_left_there() -> None:
    holdings = Holdings()
    holdings.begin(TurnKey("c", 7, 1))
    assert holdings.stored_tokens("c") == 0
    holdings.finish(TurnKey("c", 7, 1), STATS, TAILS, completed=True)
    holdings.begin(TurnKey("c", 7, 2))
    assert holdings.stored_tokens("c") == 0
    holdings.finish(TurnKey("c", 7, 2), LATER, TAILS, completed=True, parked=True)
    assert holdings.stored_tokens("c") == LATER.prompt_tokens


def test_what_lmcache_has_of_one_that_comes_back_is_what_was_prefilled_last() -> None:
    """It was paused, or bound elsewhere for a while."""
    holdings = after_one_turn()
    assert holdings.stored_tokens("c") == STATS.prompt_tokens
    holdings.begin(TurnKey("c", 7, 2), look_up=True)
    assert holdings.stored_tokens("c") is None
    holdings.finish(TurnKey("c", 7, 2), LATER, (b"u" * 16,), completed=True)
    assert holdings.stored_tokens("c") == LATER.prompt_tokens
    holdings.begin(TurnKey("c", 7, 3))
    assert holdings.stored_tokens("c") == LATER.prompt_tokens


# --- What is parked ------------------------------------------------------------------------------


def parked_after(*turns: tuple[TurnStats | None, bool]) -> list[tuple[str, int, int]]:
    """The report on host memory after these turns, some of which left their KV there."""
    holdings = Holdings()
    for turn_id, (stats, parks) in enumerate(turns, 1):
        holdings.begin(TurnKey("c", 7, turn_id))
        holdings.finish(TurnKey("c", 7, turn_id), stats, (), stats is not None, parks)
    return [(one.id, one.incarnation, one.tokens) for one in holdings.parked()]


def test_what_is_in_host_memory_is_told_by_turns_that_left_or_found_it_there() -> None:
    warm = TurnStats(100, 20, 60, 0)
    assert parked_after((warm, False)) == []
    # A prefiller has left it there.
    assert parked_after((STATS, False)) == [("c", 7, 96)]
    assert parked_after((STATS, False), (LATER, False)) == [("c", 7, 96)]
    assert parked_after((warm, False), (LATER, True)) == [("c", 7, 150)]
    # Nothing is known to be there of a turn that was cut before its first token.
    assert parked_after((TurnStats(100, 0, 0, 0), True)) == []
    assert parked_after((warm, True), (None, True)) == [("c", 7, 100)]


def test_what_a_turn_does_not_find_is_not_there_any_more() -> None:
    lost = TurnStats(150, 30, 0, 0)
    assert parked_after((STATS, True), (lost, False)) == []
    assert parked_after((STATS, True), (lost, True)) == [("c", 7, 150)]


def test_of_a_conversation_that_has_ended_nothing_is_parked() -> None:
    holdings = after_one_turn()
    assert len(holdings.parked()) == 1
    holdings.begin(TurnKey("c", 8, 2))
    assert holdings.parked() == []
    holdings.finish(TurnKey("c", 8, 2), LATER, (), completed=True, parked=True)
    holdings.drop("c", 7)
    assert [one.incarnation for one in holdings.parked()] == [8]
    holdings.drop("c", 8)
    assert holdings.parked() == []


def completed(id: str) -> Holdings:
    holdings = Holdings()
    holdings.begin(TurnKey(id, 7, 1))
    holdings.finish(TurnKey(id, 7, 1), STATS, (), completed=True)
    return holdings


def continued(holdings: Holdings, conversation_id: str | None) -> str | None:
    found = holdings.continued(b"", b"", conversation_id)
    return None if found is None else found.id


def test_a_completion_goes_on_with_its_conversations_while_none_runs() -> None:
    holdings = completed("c")
    assert continued(holdings, "c") == "c"
    assert continued(holdings, "d") is None
    assert continued(holdings, None) is None
    holdings.begin(TurnKey("c", 7, 2))
    assert continued(holdings, "c") is None
    holdings.finish(TurnKey("c", 7, 2), LATER, (), completed=True)
    assert continued(holdings, "c") == "c"
    holdings.drop("c", 7)
    assert continued(holdings, "c") is None


def test_a_completion_goes_on_beside_chats_and_not_with_them() -> None:
    chat = Holdings()
    chat.begin(TurnKey("c", 7, 1), root=b"r" * 16)
    chat.finish(TurnKey("c", 7, 1), STATS, TAILS, completed=True)
    assert continued(chat, "c") is None
    beside = identity.further("c", 0)
    chat.begin(TurnKey(beside, 8, 2))
    assert continued(chat, "c") is None
    chat.finish(TurnKey(beside, 8, 2), STATS, (), completed=True)
    assert continued(chat, "c") == beside


def test_completions_that_were_taken_back_go_on_once_the_table_has_sent_one() -> None:
    holdings = completed("c")
    holdings.give_up("c", 7)
    assert continued(holdings, "c") is None
    holdings.begin(TurnKey("c", 7, 2))
    holdings.finish(TurnKey("c", 7, 2), None, (), completed=False)
    assert continued(holdings, "c") is None
    holdings.begin(TurnKey("c", 7, 3))
    holdings.finish(TurnKey("c", 7, 3), LATER, (), completed=True)
    assert continued(holdings, "c") == "c"


def test_equal_histories_are_the_tables_to_tell_apart() -> None:
    """It may have chosen one of them for another client's turn, which has not arrived yet."""
    root = b"r" * 16
    holdings = Holdings()
    equal, _, other = ids = [identity.new_id() for _ in range(3)]
    for incarnation, id in enumerate(ids):
        holdings.begin(TurnKey(id, incarnation, incarnation), root=root)
        tails = TAILS if id != other else (b"u" * 16,)
        holdings.finish(TurnKey(id, incarnation, incarnation), STATS, tails, completed=True)
    assert holdings.continued(root, TAILS[0], None) is None
    found = holdings.continued(root, b"u" * 16, None)
    assert found is not None
    assert found.id == other
    # The last one, too, until it has said something of its own.
    holdings.begin(TurnKey(equal, 0, 3))
    holdings.finish(TurnKey(equal, 0, 3), LATER, (b"v" * 16,), completed=True)
    assert holdings.continued(root, TAILS[0], None) is None
    found = holdings.continued(root, b"v" * 16, None)
    assert found is not None
    assert found.id == equal
