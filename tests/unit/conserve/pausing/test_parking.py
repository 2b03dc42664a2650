"""Parked histories: which are in host memory, make room by that, and come back from there."""

from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conserve.admission import Admission, Ticket
from conserve.conversations import ConversationTable
from conserve.events import EventLog
from conserve.history import History
from conserve.holdings import Holdings
from conserve.pausing import Pausing
from conserve.placement import ConversationPlacement
from conserve.turn import TurnStats
from tests.unit.conserve.conversations.scene import Turn, a_table, start, the
from tests.unit.conserve.pausing.scene import (
    NOW_S,
    a_parking_table,
    bound,
    ends,
    idle,
    memory_of,
    parking,
    paused,
)


def test_who_is_parked_makes_room_at_once_and_comes_back_from_host_memory() -> None:
    table = a_parking_table()
    assert not parking(table, "early", 400)  # There was room for all.
    assert parking(table, "late", 500)
    assert memory_of(table).parked_tokens == 490
    # Neither has been idle for long: the one that is parked goes, though it is the longer one.
    assert table.bind("new", 300, NOW_S + 1) is not None
    assert paused(table) == {"late"}
    table.release("new")
    assert table.bind("newer", 600, NOW_S + 1) is not None
    Turn.last(table, "newer").advance(table, 600, (b"n" * 16,), NOW_S + 1)
    table.release("newer")
    assert bound(table, "late", 550, NOW_S + 2).prefiller_id is None
    assert memory_of(table).restores == {"reloaded": 1}


def test_who_would_not_be_found_there_for_long_keeps_its_room() -> None:
    """Host memory that is full, with nothing older than half a minute, soon evicts it.

    But not if it has room for all that is worked on: then only what is not is evicted.
    """
    for first_s, others_tokens, goes in (
        (NOW_S - 30, 1400, False),
        (NOW_S - 30, 1300, True),
        (NOW_S - 90, 1400, True),
    ):
        table = a_parking_table(host_tokens=1000)
        memory_of(table).working.add("others", others_tokens)
        assert parking(table, "early", 500, first_s)
        table.release("early")
        assert parking(table, "a", 600, NOW_S)
        assert memory_of(table).parked_tokens == 1000
        start(table, "runs", 10, NOW_S)
        placement = table.bind("new", 700, NOW_S + 1)
        assert (placement is not None) == goes
        assert paused(table) == ({"a"} if goes else set())


def test_nothing_is_parked_that_host_memory_would_evict_before_its_engine_does() -> None:
    """Five histories take turns on a decoder that holds two; host memory has room for one."""
    table = a_parking_table(host_tokens=450)
    parks = []
    for second, name in enumerate("abcde"):
        parks.append(parking(table, name, 500, NOW_S + second))
        memory_of(table).pause(the(table, name), "room")
    # Every second one finds a copy there that is older than what the engine has.
    assert parks == [True, False, True, False, True]
    # Decoders that begin turns by themselves are told the same.
    assert not memory_of(table).parks_on("d1", NOW_S + 5)


def test_engines_touch_what_waits_before_host_memory_evicts_it() -> None:
    table = a_parking_table(host_tokens=1000)
    memory = memory_of(table)
    assert parking(table, "waits", 600)
    memory.pause(the(table, "waits"), "room")
    start(table, "runs", 900, NOW_S)
    admission = Admission(table, limit=10, timeout_s=600.0)
    for name in ("waits", "new"):
        assert isinstance(admission.enter(name, 620, NOW_S), Ticket)
    admission.observe(NOW_S)
    assert memory.take_touched("d1") == []  # There is room.
    memory.parked(the(table, "runs"), 400)
    touched = []
    for second in range(1, 31):
        admission.observe(NOW_S + second)
        touched += [(second, name) for name in memory.take_touched("d1")]
    # Once it is the newest by far, it is kept for long.
    assert touched == [(5, "waits"), (10, "waits"), (15, "waits")]
    # Nobody touches what was on a decoder that is lost.
    memory.parked(the(table, "runs"), 410)
    table.remove_engine("d1")
    admission.observe(NOW_S + 100)
    assert memory.take_touched("d1") == []


def test_host_memory_serves_any_decoder_and_who_has_lost_his() -> None:
    table = a_parking_table(decoders=2)
    start(table, "other", 100)
    start(table, "another", 400)
    home = Turn.last(table, "other").decoder_id
    assert parking(table, "a", 550)
    assert the(table, "a").home == home
    table.remove_engine(home)
    placement = bound(table, "a", 580, NOW_S)
    assert (placement.decoder_id != home, placement.prefiller_id) == (True, None)
    # Of a prompt that is mostly new a prefiller computes the rest, and it counts as one.
    table.remove_engine(placement.decoder_id)
    table.add_decoder("d3", 5000)
    assert bound(table, "a", 1200).prefiller_id == "p1"


def test_what_a_prefiller_has_computed_is_in_host_memory() -> None:
    table = a_parking_table()
    turn = start(table, "a", 300)
    table.prefilled(turn.key, 300)
    ends(table, "a", TurnStats(300, 10, 0, 256))
    assert memory_of(table).parked_tokens == 300
    # A shorter prompt of it takes nothing away.
    memory_of(table).parked(the(table, "a"), 100)
    assert memory_of(table).parked_tokens == 300


def test_nothing_is_parked_without_host_memory_or_by_a_turn_that_came_to_nothing() -> None:
    table = a_parking_table(host_tokens=0)
    assert not parking(table, "a", 800)
    assert memory_of(table).parked_tokens == 0
    memory_of(table).set_host_tokens(5000)
    # One that was cut has left its prompt.
    for seen, parked in ((None, 0), (TurnStats(850, 3, 800, 0), 850)):
        turn = start(table, "a", 850, NOW_S)
        assert table.park(the(table, "a"))
        turn.abandon(table, seen)
        assert memory_of(table).parked_tokens == parked
    memory_of(table).set_host_tokens(0)
    assert memory_of(table).parked_tokens == 0
    # And of one that ends with a turn under way, nothing is remembered.
    memory_of(table).set_host_tokens(5000)
    start(table, "a", 850, NOW_S)
    assert table.park(the(table, "a"))
    table.release("a")
    assert memory_of(table)._parking == set()
    without = a_table()
    start(without, "a", 900)
    assert not without.park(the(without, "a"))


def test_what_is_not_found_there_is_looked_for_no_more() -> None:
    """LMCache's server was restarted."""
    table = a_parking_table()
    assert parking(table, "a", 600)
    memory_of(table).pause(the(table, "a"), "room")
    for found, parked in ((300, 590), (290, 0)):
        memory_of(table).parked(the(table, "a"), 590)
        bound(table, "a", 700)
        ends(table, "a", TurnStats(700, 10, 0, found))
        assert memory_of(table).parked_tokens == parked
        memory_of(table).pause(the(table, "a"), "room")


def test_it_tells_who_is_parked_paused_and_back() -> None:
    events = EventLog(lambda: NOW_S)
    table = ConversationTable(ConversationPlacement(), 1e9, 0.0, 1, Pausing(), events)
    table.add_prefiller("p1")
    for name in ("d1", "d2"):
        table.add_decoder(name, 1000)
    memory_of(table).set_host_tokens(5000)
    assert parking(table, "a", 600)
    memory_of(table).pause(the(table, "a"), "room")
    for turn in (1, 2):
        assert table.bind("a", 650, NOW_S) is not None
        assert Turn.last(table, "a").advance(table, 650, (b"a" * 16,))
        if turn == 1:
            table.remove_engine("d1")
    told = [(one.kind, one.details) for one in events.after(0)]
    assert told == [
        ("park", {"decoder": "d1", "tokens": 590}),
        ("pause", {"decoder": "d1", "reason": "room", "freed_tokens": 600}),
        ("restore", {"decoder": "d1", "where": "kept", "was_on": "d1"}),
        # There was nothing of it in the engine, so nothing is taken to be in host memory either.
        ("restore", {"decoder": "d2", "where": "unbound"}),
    ]


def test_what_an_ended_history_has_left_is_not_that_of_the_next_one_of_its_id() -> None:
    table = a_parking_table(host_tokens=5000)
    assert parking(table, "main", 900)
    table.release("main")
    assert not parking(table, "main", 400)
    assert memory_of(table).parked_tokens == 890
    table.remove_engine("d1")
    table.add_decoder("d2", 1000)
    assert bound(table, "main", 420).prefiller_id == "p1"


@pytest.mark.parametrize("parks", [False, True])
def test_a_turn_that_was_cut_before_its_first_token_says_nothing_of_host_memory(
    parks: bool,
) -> None:
    table = a_parking_table()
    assert parking(table, "a", 600)
    turn = start(table, "a", 900, NOW_S)
    if parks:
        assert table.park(the(table, "a"))
    turn.abandon(table, TurnStats(900, 0, 0, 0))
    assert memory_of(table).parked_tokens == 590


def test_it_counts_since_when_a_copy_lies_there_not_since_when_its_history_was_used() -> None:
    table = a_parking_table(host_tokens=1000)
    memory_of(table).working.add("others", 1400)
    start(table, "runs", 10, NOW_S)
    assert parking(table, "a", 600, NOW_S - 100)
    # It goes on, on its decoder alone; meanwhile others have come.
    start(table, "a", 650, NOW_S)
    ends(table, "a", TurnStats(640, 10, 600, 0))
    memory_of(table).parked(History("other", 99, NOW_S, NOW_S), 400)
    assert table.bind("new", 700, NOW_S + 1) is None
    # A turn that takes it from there has it stay.
    start(table, "a", 660, NOW_S)
    ends(table, "a", TurnStats(650, 10, 0, 590), NOW_S + 70)
    assert table.bind("new", 700, NOW_S + 71) is not None
    assert paused(table) == {"a"}


def test_who_moved_and_is_computed_there_was_not_kept() -> None:
    table = ConversationTable(ConversationPlacement(), 1e9, 0.0, 1, Pausing())
    for name in ("d1", "d2"):
        table.add_decoder(name, 1000)
    idle(table, "a", 600, NOW_S)
    memory_of(table).pause(the(table, "a"), "room")
    start(table, "b", 900, NOW_S)
    assert table.bind("a", 650, NOW_S) is not None
    assert the(table, "a").home == "d2"
    assert memory_of(table).restores == {"moved": 1}


def test_a_lost_decoder_takes_along_which_of_its_turns_were_to_park() -> None:
    table = a_parking_table()
    start(table, "a", 800)
    assert table.park(the(table, "a"))
    table.remove_engine("d1")
    assert memory_of(table)._parking == set()


# --- After a table was lost ----------------------------------------------------------------------

TURNS = st.lists(
    st.tuples(
        st.sampled_from("abcd"),
        st.sampled_from(["kept", "reloaded", "lost"]),
        st.integers(20, 300),
        st.booleans(),
        st.integers(0, 9),
    ),
    max_size=25,
)


def rebuilt(
    table: ConversationTable, holdings: dict[str, Holdings], order: list[str]
) -> ConversationTable:
    """A new table, to which decoders report in this order what they hold and have parked."""
    new = ConversationTable(ConversationPlacement(), 100, 150, 10_000, pausing=Pausing())
    new.add_prefiller("p1")
    for decoder_id in order:
        new.add_decoder(decoder_id, 5000, holdings[decoder_id].all())
        memory_of(new).set_host_tokens(100_000)
        memory_of(new).take_over(holdings[decoder_id].parked())
    return new


@given(TURNS, st.booleans())
def test_a_table_made_anew_knows_what_is_parked(
    turns: list[tuple[str, str, int, bool, int]], reverse: bool
) -> None:
    table = a_table(decoders=2, capacity_tokens=5000, pausing=Pausing())
    memory_of(table).set_host_tokens(100_000)
    holdings = {decoder_id: Holdings() for decoder_id in table.decoders}
    now_s = 0.0
    for name, how, more, parks, then in turns:
        now_s += 1
        known = table.get(name)
        was = 0 if known is None else known.held_tokens or known.last_tokens
        turn = start(table, name, was + more, now_s)
        history = the(table, name)
        own = holdings[turn.decoder_id]
        if parks:
            memory_of(table)._parking.add(turn.id)
        found = 0 if how == "lost" else was
        cached, loaded = (0, found) if how == "reloaded" else (found, 0)
        stats = TurnStats(was + more, 10, cached, loaded)
        if loaded:
            table.prefilled(turn.key, loaded)
        with patch("conserve.holdings.unix_s", lambda now_s=now_s: now_s):
            own.begin(turn.key)
            own.finish(turn.key, stats, (), completed=True, parked=parks)
        assert table.advance(turn.key, turn.decoder_id, stats, (), now_s)
        if then == 0:
            table.release(name)
            own.drop(name, history.incarnation)
        elif then == 1:
            memory_of(table).pause(history, "room")
    # What has moved, its old decoder is told to forget.
    for one in memory_of(table).take_forgotten():
        holdings[one.decoder_id].drop(one.history_id, one.incarnation)
    new = rebuilt(table, holdings, sorted(holdings, reverse=reverse))
    for history in table.live():
        here = memory_of(new)._host
        before = memory_of(table)._host
        key = f"{history.incarnation} {history.id}"
        # What has moved since may be known by its newest decoder alone.
        if not memory_of(table)._left.get(history.id):
            assert here.left_tokens(key) == before.left_tokens(key)


def test_who_was_parked_makes_room_at_once_under_a_new_table_too() -> None:
    old = a_parking_table()
    held = Holdings()
    turn = start(old, "a", 600, NOW_S)
    held.begin(turn.key)
    stats = TurnStats(600, 10, 0, 0)
    with patch("conserve.holdings.unix_s", lambda: NOW_S):
        held.begin(turn.key)
        held.finish(turn.key, stats, (), completed=True, parked=True)
    for parked, goes in ((held.parked(), True), ([], False)):
        new = ConversationTable(ConversationPlacement(), 100, 150, 10_000, pausing=Pausing())
        new.add_decoder("d1", 1000, held.all())
        memory_of(new).set_host_tokens(10_000)
        memory_of(new).take_over(parked)
        new.add_prefiller("p1")
        start(new, "runs", 10, NOW_S)
        assert (new.bind("new", 600, NOW_S + 1) is not None) == goes
        assert paused(new) == ({"a"} if goes else set())
        if goes:
            new.release("new")
            new.add_decoder("d2", 1000)
            start(new, "other", 900, NOW_S + 1)
            # And it is found there.
            memory_of(new).lost([the(new, "a")])
            assert bound(new, "a", 640, NOW_S + 2).prefiller_id is None
