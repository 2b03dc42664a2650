"""The newest events are kept, and all are counted."""

import pytest

from conserve import identity
from conserve.events import EventLog


def a_log(most: int = 3, first: int = 1) -> EventLog:
    times = iter(range(1000))
    return EventLog(lambda: float(next(times)), first, most)


def test_who_asks_in_time_misses_nothing() -> None:
    log = a_log()
    seen: list[int] = []
    after = log.newest
    for number in range(10):
        log.add("pause", f"h{number}", tokens=number)
        if number % 3 == 2:
            assert log.missed(after) == 0
            seen += [one.details["tokens"] for one in log.after(after)]
            after = log.newest
    assert seen == list(range(9))
    assert [one.at_s for one in log.after(after)] == [9.0]
    assert log.counts == {"pause": 10}


@pytest.mark.parametrize(("after", "missed", "told"), [(0, 7, 3), (5, 2, 3), (7, 0, 3), (9, 0, 1)])
def test_who_asks_late_is_told_how_many_are_missed(after: int, missed: int, told: int) -> None:
    log = a_log()
    for _ in range(10):
        log.add("end", "h")
    assert (log.missed(after), len(log.after(after))) == (missed, told)


def test_a_log_that_succeeds_another_knows_nothing_of_that_ones_events() -> None:
    log = a_log(first=1000)
    assert (log.newest, log.missed(5), log.after(5)) == (999, 0, [])
    log.add("wait", "h")
    assert [one.number for one in log.after(5)] == [1000]
    for _ in range(3):
        log.add("place", "h")
    assert log.missed(5) == 1


def test_some_kinds_or_some_histories_alone_can_be_asked_for() -> None:
    log = a_log(most=10)
    for kind, history in [("place", "a"), ("pause", "b"), ("engine_lost", ""), ("pause", "a")]:
        log.add(kind, history)  # type: ignore[arg-type]
    assert [one.number for one in log.after(0, kinds=("pause",))] == [2, 4]
    assert [one.number for one in log.after(0, mine=lambda id_: id_ == "a")] == [1, 4]
    assert [one.number for one in log.after(0, ("pause",), lambda id_: id_ == "a")] == [4]


def test_a_conversations_own_are_those_of_all_of_its_histories() -> None:
    log = a_log(most=4)
    histories = ["c", identity.further("c", 7), "d", "", identity.scoped("acme", "c"), "c"]
    for history in histories:
        log.add("start", history)
    # The first two are not kept any more.
    assert [one.number for one in log.newest_of("c", 9)] == [6]
    assert [one.number for one in log.newest_of("acme\tc", 9)] == [5]
    log.add("end", identity.further("c", 8))
    assert [one.number for one in log.newest_of("c", 9)] == [6, 7]
    assert [one.number for one in log.newest_of("c", 1)] == [7]
    assert log.newest_of("d", 9) == log.newest_of("nobody", 9) == []
    # Nothing is remembered of who is not there.
    assert set(log._of) == {"", "acme\tc", "c"}


def test_what_is_none_is_left_out() -> None:
    log = a_log()
    log.add("cut", "h", decoder=None, output_tokens=0)
    assert log.after(0)[0].details == {"output_tokens": 0}
