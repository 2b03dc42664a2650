"""The queue of conversations that wait for room."""

import pytest

from conserve.admission.queue import Queue, QueueFull, Ticket


def ticket_of(history_id: str, tokens: int, now_s: float) -> Ticket:
    return Ticket(history_id, tokens, now_s, now_s)


def waiting(queue: Queue) -> list[str]:
    return [ticket.history_id for ticket in queue.tickets(0.0)]


def test_first_in_first_out_whatever_the_length() -> None:
    queue = Queue(limit=3, timeout_s=60)
    assert (len(queue), waiting(queue), queue.leave("nobody")) == (0, [], None)
    ticket = queue.join(ticket_of("long", 9000, now_s=100))
    assert (ticket.history_id, ticket.prompt_tokens) == ("long", 9000)
    assert (ticket.joined_s, ticket.deadline_s) == (100, 160)
    assert list(queue.tickets(100)) == [ticket]
    for key, tokens in [("short", 1), ("middle", 50)]:
        queue.join(ticket_of(key, tokens, now_s=100))
    with pytest.raises(QueueFull, match=r"queue is full \(at most 3 conversations\)"):
        queue.join(ticket_of("late", 1, now_s=100))
    assert waiting(queue) == ["long", "short", "middle"]
    left = queue.leave("short")
    assert left is not None
    assert left.history_id == "short"
    assert queue.leave("short") is None
    queue.join(ticket_of("new", 1, now_s=101))
    assert waiting(queue) == ["long", "middle", "new"]


def test_who_is_refused_learns_when_a_place_is_free() -> None:
    queue = Queue(limit=1, timeout_s=30)
    queue.join(ticket_of("a", 1, now_s=0))
    with pytest.raises(QueueFull) as refused:
        queue.join(ticket_of("b", 1, now_s=20))
    assert (refused.value.limit, waiting(queue)) == (1, ["a"])
    # The head leaves at 30 s at the latest, which is after 10 s.
    assert 10 <= refused.value.retry_after_s <= 11
    assert str(refused.value).endswith(f"; try again in {refused.value.retry_after_s} s")
    queue.leave("a")
    queue.join(ticket_of("b", 1, now_s=20 + refused.value.retry_after_s))
    # From a second to a minute.
    assert (queue.retry_after_s(1000), Queue(1, 3600).retry_after_s(0)) == (1, 60)


@pytest.mark.parametrize("limit", [1, 2])
def test_nobody_has_two_places(limit: int) -> None:
    queue = Queue(limit, timeout_s=60)
    ticket = queue.join(ticket_of("a", 1, now_s=0))
    with pytest.raises(ValueError, match="'a' waits already"):
        queue.join(ticket_of("a", 2, now_s=1))
    assert list(queue.tickets(1)) == [ticket]
    assert len(queue) == 1
    queue.leave("a")
    queue.join(ticket_of("a", 2, now_s=2))
    assert waiting(queue) == ["a"]
