"""Admission: which conversations are bound at once, which wait, and in which order."""

import pytest

from conserve.admission import Admission, Admitted, QueueFull, Ticket
from conserve.history import History
from conserve.pausing import Pausing
from conserve.placement import Placement
from conserve.turn import TurnStats
from tests.unit.conserve.conversations.scene import a_table


def names(admitted: list[Admitted]) -> list[str]:
    return [one.history.id for one in admitted]


def test_who_fits_is_bound_at_once() -> None:
    table = a_table(decoders=1)
    admitted = Admission(table, 8, 60).enter("c", 300, 5.0, arrived_s=3.0)
    assert isinstance(admitted, Admitted)
    assert admitted.placement == Placement("d1", "p1")
    assert (admitted.prompt_tokens, admitted.newly_bound) == (300, True)
    assert admitted.history is table.get("c")
    assert admitted.turn == admitted.history.newest_turn
    assert admitted.history.asked_s == 3.0
    assert table.decoders["d1"].held_tokens == 300


def test_who_does_not_fit_waits_and_goes_when_there_is_room() -> None:
    table = a_table(decoders=1)
    admission = Admission(table, 8, 60)
    admission.enter("first", 800, 0.0)
    ticket = admission.enter("second", 800, 1.0, arrived_s=0.5)
    times_s = {"joined_s": 1.0, "arrived_s": 0.5, "deadline_s": 61.0}
    assert ticket == Ticket("second", 800, **times_s, own_tokens=800)
    assert admission.queue.tokens == 800
    assert admission.admit(2.0) == []
    table.release("first")
    (admitted,) = admission.admit(3.0)
    assert names([admitted]) == ["second"]
    # From its first request, not from when there was room.
    assert admitted.history.asked_s == 0.5
    assert len(admission.queue) == 0
    assert admission.admit(4.0) == []


def test_nobody_overtakes_the_head_however_small() -> None:
    table = a_table(decoders=1)
    admission = Admission(table, 8, 60)
    admission.enter("large", 700, 0.0)
    assert isinstance(admission.enter("head", 900, 1.0), Ticket)
    assert isinstance(admission.enter("small", 10, 2.0), Ticket)
    assert admission.admit(3.0) == []
    table.release("large")
    assert names(admission.admit(4.0)) == ["head", "small"]


def test_the_next_one_goes_when_the_head_gives_up() -> None:
    table = a_table(decoders=1)
    admission = Admission(table, 8, 60)
    admission.enter("large", 700, 0.0)
    admission.enter("head", 900, 1.0)
    admission.enter("small", 200, 2.0)
    left = admission.leave("head")
    assert left is not None
    assert left.prompt_tokens == 900
    assert admission.leave("head") is None
    assert names(admission.admit(3.0)) == ["small"]


def test_a_full_line_refuses_and_says_when_to_come_again() -> None:
    table = a_table(decoders=1, capacity_tokens=100)
    admission = Admission(table, 1, 60)
    admission.enter("holds", 100, 0.0)
    admission.enter("waits", 100, 10.0)
    with pytest.raises(QueueFull, match="the queue is full") as refused:
        admission.enter("late", 100, 40.0)
    assert refused.value.retry_after_s == 31
    assert "late" not in table
    assert len(admission.queue) == 1


def test_a_decoder_that_is_back_has_its_conversation_whoever_waits_before_it() -> None:
    """It was thought lost, and its conversation's turn was queued; the KV is still there."""
    table = a_table(decoders=1)
    admission = Admission(table, 8, 60)
    began = admission.enter("c", 100, 0.0)
    assert isinstance(began, Admitted)
    table.advance(began.history.newest_turn, "d1", TurnStats(100, 10, 0, 0), (), 1.0)
    held = History("c", began.history.incarnation, 0.0, 1.0, held_tokens=110, turns=1)
    table.remove_engine("d1")
    assert isinstance(admission.enter("c", 120, 2.0), Ticket)
    table.add_decoder("d1", 1000, [held])
    (admitted,) = admission.admit(3.0)
    assert (admitted.newly_bound, admitted.placement) == (False, Placement("d1", None))
    conversation = table.get("c")
    assert conversation is not None
    assert (conversation.moves, conversation.held_tokens) == (0, 110)
    assert conversation.running


def test_one_that_lost_its_decoder_is_bound_again_and_counts_as_moved() -> None:
    table = a_table()
    admission = Admission(table, 8, 60)
    began = admission.enter("c", 100, 0.0)
    assert isinstance(began, Admitted)
    table.remove_engine(began.placement.decoder_id)
    again = admission.enter("c", 120, 1.0)
    assert isinstance(again, Admitted)
    assert again.newly_bound
    assert again.history.moves == 1
    assert again.placement.decoder_id != began.placement.decoder_id
    assert (began.known, began.moved, again.known, again.moved) == (False, False, True, True)


def test_one_that_was_paused_and_is_back_has_not_moved_and_is_not_new() -> None:
    table = a_table(decoders=1, pausing=Pausing())
    admission = Admission(table, 8, 60)
    began = admission.enter("c", 600, 0.0)
    assert isinstance(began, Admitted)
    assert table.advance(began.turn, "d1", TurnStats(600, 10, 0, 0), (b"c" * 16,), 0.0)
    other = admission.enter("other", 500, 900.0)
    assert isinstance(other, Admitted)
    table.release("other")
    again = admission.enter("c", 620, 901.0)
    assert isinstance(again, Admitted)
    assert (again.newly_bound, again.known, again.moved) == (True, True, False)
