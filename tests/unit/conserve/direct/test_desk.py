"""Rules of the direct protocol: turns that decoders begin, their reports, the table's notices."""

from collections.abc import Callable

import pytest

from conserve import direct
from conserve.direct import (
    LEASE_S,
    Began,
    Continued,
    Desk,
    Ended,
    Home,
    Homes,
    Notice,
    Notices,
    Outbox,
)  # fmt: skip
from conserve.holdings import Holdings
from conserve.recognition import Chain
from conserve.turn import TurnKey, TurnStats

STATS = TurnStats(100, 20, 0, 96)
ROOT, END, NEXT = b"r" * 16, b"e" * 16, b"n" * 16
CHAT = Continued(ROOT, END, "h")


class Decoder:
    """A desk, some of whose histories have had a turn of the table's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("conserve.holdings.unix_s", lambda: 100.0)
        self.holdings = Holdings()
        self.desk = Desk(self.holdings, idle_timeout_s=60.0)
        self.desk.outbox.register()
        self.desk.hear(Notice(0), asked_s=100.0)
        self.turn(0)

    def turn(self, number: int, end: bytes = END, completed: bool = True) -> None:
        turn = TurnKey("h", 1, number)
        self.holdings.begin(turn, root=ROOT)
        self.holdings.finish(turn, STATS, (end,), completed=completed)

    def begins(self, asked: Continued = CHAT, now_s: float = 101.0) -> TurnKey | None:
        return self.desk.begin(asked, "router", now_s)


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch) -> Decoder:
    return Decoder(monkeypatch)


def given_up(decoder: Decoder) -> None:
    decoder.desk.hear(Notice(1, given_up=(("h", 1),)), 101.0)


# What has happened, and whether the next turn begins here all the same.
REASONS: dict[str, tuple[Callable[[Decoder], object], bool]] = {
    "nothing": (lambda one: None, True),
    "a turn runs": (lambda one: one.holdings.begin(TurnKey("h", 1, 1)), False),
    "the table has taken it back": (given_up, False),
    "it has, in another incarnation": (
        lambda one: one.desk.hear(Notice(1, given_up=(("h", 2),)), 101.0), True),
    "the table has sent a turn since": (lambda one: (given_up(one), one.turn(256)), True),
    "that turn was cut": (lambda one: (given_up(one), one.turn(256, completed=False)), False),
    "an earlier turn has ended since": (
        lambda one: (one.holdings.begin(TurnKey("h", 1, 1)), given_up(one),
                     one.holdings.finish(TurnKey("h", 1, 1), STATS, (END,), True)), False),
    "it has ended": (lambda one: one.desk.hear(Notice(1, ended=(("h", 1),)), 101.0), False),
    "it has another answer": (lambda one: one.turn(256, NEXT), False),
    "the table does not know the decoder": (lambda one: one.desk.stop(), False),
    "the decoder leaves": (lambda one: one.desk.close(), False),
    "its numbers are used up": (lambda one: one.turn(255), False),
    "more events wait than are kept": (
        lambda one: [one.desk.outbox.add(Began(TurnKey("x", 1, n), "")) for n in range(4096)],
        False),
}  # fmt: skip


@pytest.mark.parametrize("reason", REASONS)
def test_a_decoder_begins_a_turn_only_if_it_is_plainly_the_next(
    decoder: Decoder, reason: str
) -> None:
    happens, begins = REASONS[reason]
    happens(decoder)
    assert (decoder.begins() is not None) == begins


def test_nothing_begins_behind_the_lease_and_after_a_long_pause(decoder: Decoder) -> None:
    assert decoder.begins(now_s=100.0 + LEASE_S) is None
    decoder.desk.hear(Notice(0), asked_s=127.0)
    # An older request's answer does not shorten it.
    decoder.desk.hear(Notice(0), asked_s=101.0)
    assert decoder.begins(now_s=130.0) is None  # Idle for half of its timeout.
    assert decoder.begins(now_s=129.9) == TurnKey("h", 1, 1)
    assert decoder.begins(now_s=129.9) is None


def test_a_turn_that_begins_is_reported(decoder: Decoder) -> None:
    decoder.desk.hear(Notice(1, parks=True), 101.0)
    turn = decoder.begins()
    assert turn is not None
    assert direct.is_direct(turn.turn_id)
    assert not direct.is_direct(direct.first_asked(turn.turn_id))
    report = decoder.desk.outbox.next()
    assert report is not None
    assert report == (1, (Began(turn, "router", True),), 1)


def ended(number: int) -> Ended:
    return Ended(TurnKey("h", 1, number), STATS, (), completed=True)


def test_reports_come_one_at_a_time_until_they_are_answered() -> None:
    outbox = Outbox()
    outbox.add(ended(0))
    outbox.add(Began(TurnKey("h", 1, 1), ""))  # The table does not know the decoder.
    assert outbox.next() is None
    assert outbox.register() == 1
    first = outbox.next()
    assert first == (1, (ended(0),), 0)
    outbox.add(ended(1))
    outbox.answered(2)
    assert outbox.next() == first
    outbox.answered(1)
    assert outbox.next() == (2, (ended(1),), 0)
    outbox.answered(2)
    assert outbox.next() is None
    # A notice that was obeyed is news, once.
    outbox.obeyed(5)
    outbox.obeyed(4)
    assert outbox.next() == (3, (), 5)
    outbox.answered(3)
    assert outbox.next() is None


def test_a_new_registration_has_the_ends_and_no_beginnings() -> None:
    outbox = Outbox()
    outbox.register()
    outbox.add(ended(0))
    outbox.obeyed(3)
    assert outbox.next() is not None
    outbox.add(Began(TurnKey("h", 1, 1), ""))
    outbox.close()
    outbox.add(ended(1))
    assert outbox.next() is None
    assert outbox.register() == 2
    # What the table may have had of the last report comes again: it changes nothing.
    assert outbox.next() == (1, (ended(0), ended(1)), 0)


def test_notices_tell_what_to_give_up_until_it_is_confirmed() -> None:
    notices = Notices()
    told: list[str] = []
    notices.tell = told.append
    assert notices.due("d", 0) is None
    assert (notices.probe("d"), notices.has_heard("d", 1)) == (0, True)
    notices.add("d", 1)
    notices.add("d", 1)
    notices.give_up("d", "a", 1)
    notices.give_up("d", "b", 2, ended=True)
    assert told == ["d"] * 3
    assert notices.due("d", 0) == Notice(2, (("a", 1),), (("b", 2),))
    assert notices.due("d", 1) == Notice(2, (), (("b", 2),))
    assert notices.unconfirmed("a") == notices.unconfirmed("b") == ["d"]
    assert notices.may_run("d", "a", 1)
    assert not notices.may_run("d", "a", 2)
    notices.confirm("d", 1)
    notices.confirm("d", 0)
    assert (notices.unconfirmed("a"), notices.unconfirmed("b")) == ([], ["d"])
    assert not notices.may_run("d", "a", 1)
    assert (notices.has_heard("d", 1), notices.has_heard("d", 2)) == (True, False)
    assert notices.probe("d") == 3
    assert told == ["d"] * 4
    notices.remove("d")
    notices.remove("d")
    assert told == ["d"] * 5
    assert notices.has_heard("d", 2)


def test_reports_are_accepted_once_and_in_order() -> None:
    notices = Notices()
    assert not notices.is_new("d", 1)
    notices.add("d", 1)
    assert [notices.is_new("d", number) for number in (2, 1, 1, 2)] == [False, True, False, True]
    assert notices.is_current("d", 1)
    # It has registered again, and tells all of it anew.
    notices.give_up("d", "a", 1)
    notices.add("d", 2)
    assert not notices.is_current("d", 1)
    assert notices.unconfirmed("a") == []
    assert notices.is_new("d", 1)


def test_a_router_remembers_where_histories_with_an_answer_are() -> None:
    homes, home = Homes(), Home("d", "http://d")
    ends = ((ROOT, ()), (ROOT, (END,)), (NEXT, (END,)))
    first, later, other = (Chain(root, None, answers) for root, answers in ends)
    homes.remember("c", first, home)
    assert homes.find("c", later, None) == home
    # A first turn is the table's; another history's decoder is not known.
    assert homes.find("c", first, None) is homes.find("c", other, None) is None
    homes.forget("c", later)
    assert homes.find("c", later, None) is None


@pytest.mark.parametrize(("parks", "tokens", "begins"), [
    (True, 999, True), (True, 1_000, False), (False, 50_000, True),
])  # fmt: skip
def test_with_host_memory_a_turn_that_would_wait_is_the_tables_to_place(
    decoder: Decoder, parks: bool, tokens: int, begins: bool
) -> None:
    decoder.desk.hear(Notice(1, parks=parks), 101.0)
    began = decoder.desk.begin(CHAT, "router", 101.0, tokens)
    assert (began is not None) is begins
