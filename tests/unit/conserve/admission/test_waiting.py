"""The queue of conversations that wait for room."""

import pytest

from conserve.admission.waiting import QueueFull, WaitingLine


def waiting(line: WaitingLine) -> list[str]:
    return [ticket.history_id for ticket in line.tickets(0.0)]


def test_first_in_first_out_whatever_the_length() -> None:
    line = WaitingLine(limit=3, timeout_s=60)
    assert (len(line), waiting(line), line.leave("nobody")) == (0, [], None)
    ticket = line.join("long", 9000, now_s=100)
    assert (ticket.history_id, ticket.prompt_tokens) == ("long", 9000)
    assert (ticket.joined_s, ticket.deadline_s) == (100, 160)
    assert list(line.tickets(100)) == [ticket]
    for key, tokens in [("short", 1), ("middle", 50)]:
        line.join(key, tokens, now_s=100)
    with pytest.raises(QueueFull, match=r"^3 conversations wait"):
        line.join("late", 1, now_s=100)
    assert waiting(line) == ["long", "short", "middle"]
    left = line.leave("short")
    assert left is not None
    assert left.history_id == "short"
    assert line.leave("short") is None
    line.join("new", 1, now_s=101)
    assert waiting(line) == ["long", "middle", "new"]


def test_who_is_refused_learns_when_a_place_is_free() -> None:
    line = WaitingLine(limit=1, timeout_s=30)
    line.join("a", 1, now_s=0)
    with pytest.raises(QueueFull) as refused:
        line.join("b", 1, now_s=20)
    assert (refused.value.limit, waiting(line)) == (1, ["a"])
    # The head leaves at 30 s at the latest, which is after 10 s.
    assert 10 <= refused.value.retry_after_s <= 11
    assert str(refused.value) == (
        f"1 conversation waits for room already; try again in {refused.value.retry_after_s} s"
    )
    line.leave("a")
    line.join("b", 1, now_s=20 + refused.value.retry_after_s)
    # From a second to a minute.
    assert (line.retry_after_s(1000), WaitingLine(1, 3600).retry_after_s(0)) == (1, 60)


@pytest.mark.parametrize("limit", [1, 2])
def test_nobody_has_two_places(limit: int) -> None:
    line = WaitingLine(limit, timeout_s=60)
    ticket = line.join("a", 1, now_s=0)
    with pytest.raises(ValueError, match="'a' waits already"):
        line.join("a", 2, now_s=1)
    assert list(line.tickets(1)) == [ticket]
    assert len(line) == 1
    line.leave("a")
    line.join("a", 2, now_s=2)
    assert waiting(line) == ["a"]
