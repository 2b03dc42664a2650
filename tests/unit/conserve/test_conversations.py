"""Bindings of conversations to decoders, and what each decoder holds."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from conserve.conversation import Conversation, TurnKey, TurnStats
from conserve.conversations import ConversationTable
from conserve.holdings import Holdings
from conserve.placement import (
    ConversationPlacement,
    FullDisaggregationPlacement,
    Placement,
    PlacementPolicy,
)

IDLE_S = 100.0
TURN_S = 150.0
TAILS = (b"1" * 16,)
OTHER_TAILS = (b"2" * 16,)


def a_table(
    decoders: int = 2,
    prefillers: int = 1,
    capacity_tokens: int = 1000,
    policy: PlacementPolicy | None = None,
) -> ConversationTable:
    table = ConversationTable(policy or ConversationPlacement(), IDLE_S, TURN_S)
    for i in range(1, decoders + 1):
        table.add_decoder(f"d{i}", capacity_tokens)
    for i in range(1, prefillers + 1):
        table.add_prefiller(f"p{i}")
    return table


def the(table: ConversationTable, conversation_id: str) -> Conversation:
    conversation = table.get(conversation_id)
    assert conversation is not None
    return conversation


def stats(prompt_tokens: int, output_tokens: int = 10) -> TurnStats:
    return TurnStats(prompt_tokens, output_tokens, 0, 0)


@dataclass(frozen=True)
class Turn:
    """A turn that was started, as its router and decoder know it."""

    conversation_id: str
    incarnation: int
    id: int
    decoder_id: str

    @classmethod
    def last(cls, table: ConversationTable, conversation_id: str) -> "Turn":
        conversation = the(table, conversation_id)
        assert conversation.decoder_id is not None
        return cls(
            conversation_id,
            conversation.incarnation,
            conversation.running[-1],
            conversation.decoder_id,
        )

    @property
    def key(self) -> TurnKey:
        return TurnKey(self.conversation_id, self.incarnation, self.id)

    def advance(
        self, table: ConversationTable, prompt_tokens: int,
        tails: tuple[bytes, ...] = (), now_s: float = 0,
    ) -> bool:  # fmt: skip
        return table.advance(self.key, self.decoder_id, stats(prompt_tokens), tails, now_s)

    def abandon(
        self, table: ConversationTable, seen: TurnStats | None = None, now_s: float = 0
    ) -> Conversation | None:
        return table.abandon(self.key, self.decoder_id if seen else None, seen, now_s)


def start(
    table: ConversationTable, conversation_id: str, turn1_tokens: int = 100, now_s: float = 0
) -> Turn:
    """A turn of the conversation, bound first where it has to be."""
    if table.begin(conversation_id, now_s) is None:
        assert table.bind(conversation_id, turn1_tokens, now_s) is not None
    return Turn.last(table, conversation_id)


def turn(
    table: ConversationTable, conversation_id: str, prompt_tokens: int = 100,
    tails: tuple[bytes, ...] = (), now_s: float = 0,
) -> Turn:  # fmt: skip
    """A whole turn."""
    started = start(table, conversation_id, prompt_tokens, now_s)
    assert started.advance(table, prompt_tokens, tails, now_s)
    return started


def held(table: ConversationTable) -> dict[str, tuple[int, int]]:
    return {d.id: (d.held_tokens, d.conversations) for d in table.decoders.values()}


def binding(table: ConversationTable, conversation_id: str) -> str | None:
    return the(table, conversation_id).decoder_id


# --- A conversation's life -----------------------------------------------------------------------


def test_a_whole_life() -> None:
    table = a_table()
    assert table.bind("c", 300, now_s=1) == Placement("d1", "p1")
    conversation = the(table, "c")
    assert conversation.phase == "reasoning"
    # Promised tokens count before the first one has arrived.
    assert held(table) == {"d1": (300, 1), "d2": (0, 0)}
    assert table.prefillers["p1"].queued_tokens == 300

    table.prefilled(conversation.newest_turn)
    assert table.prefillers["p1"].queued_tokens == 0

    assert Turn.last(table, "c").advance(table, 300, TAILS, now_s=2)
    assert conversation.phase == "acting"
    assert (conversation.turns, conversation.held_tokens) == (1, 310)
    assert conversation.last_turn == stats(300)

    assert table.begin("c", now_s=3) is conversation
    assert conversation.phase == "reasoning"
    assert Turn.last(table, "c").advance(table, 400, OTHER_TAILS, now_s=4)
    assert held(table) == {"d1": (410, 1), "d2": (0, 0)}
    assert (conversation.created_s, conversation.last_used_s) == (1, 4)

    assert table.release("c") is conversation
    assert held(table) == {"d1": (0, 0), "d2": (0, 0)}
    assert "c" not in table
    assert len(table) == table.reasoning == 0


def test_a_bound_conversation_is_not_bound_again() -> None:
    table = a_table()
    turn(table, "c")
    with pytest.raises(ValueError, match="'c' is bound to d1"):
        table.bind("c", 100, now_s=1)
    assert held(table)["d1"] == (110, 1)


def test_unknown_conversations() -> None:
    table = a_table()
    assert table.get("c") is None
    assert table.begin("c", now_s=0) is None
    assert table.release("c") is None
    assert not Turn("c", 1, 1, "d1").advance(table, 100)
    assert Turn("c", 1, 1, "d1").abandon(table) is None
    assert not table.holds(TurnKey("c", 1, 1), "d1")
    table.prefilled(TurnKey("c", 1, 1))
    assert len(table) == 0


def test_without_room_nothing_is_changed() -> None:
    table = a_table(decoders=1)
    turn(table, "big", 900)
    assert table.bind("c", 200, now_s=0) is None
    assert "c" not in table
    assert held(table) == {"d1": (910, 1)}
    assert table.prefillers["p1"].queued_tokens == 0


def test_twenty_arriving_at_once_spread_by_promised_tokens() -> None:
    """The router's reports of arrival come later; what was promised has to count."""
    table = a_table(decoders=4, capacity_tokens=100_000)
    lengths = [1000 + 37 * i for i in range(20)]
    for i, length in enumerate(lengths):
        table.bind(f"c{i}", length, now_s=0)
    tokens = [t for t, _ in held(table).values()]
    assert sum(tokens) == sum(lengths)
    assert max(tokens) - min(tokens) <= max(lengths)
    assert {conversations for _, conversations in held(table).values()} == {5}


def test_arrivals_go_to_the_emptier_decoder_until_it_is_level() -> None:
    table = a_table(decoders=2, capacity_tokens=100_000)
    turn(table, "long", 10_000)
    assert binding(table, "long") == "d1"
    for i in range(12):
        table.bind(f"c{i}", 1000, now_s=0)
    assert [binding(table, f"c{i}") for i in range(11)] == ["d2"] * 11
    assert binding(table, "c11") == "d1"


def test_concurrent_turns_of_one_conversation() -> None:
    table = a_table()
    turn(table, "c")
    first, second = start(table, "c"), start(table, "c")
    assert table.reasoning == 1
    first.advance(table, 200)
    assert the(table, "c").phase == "reasoning"
    second.advance(table, 210)
    assert the(table, "c").phase == "acting"
    assert the(table, "c").turns == 3


def test_recent_ones_are_listed_first() -> None:
    table = a_table()
    for now_s, conversation_id in enumerate("abca"):
        turn(table, conversation_id, now_s=now_s)
    assert [c.id for c in table.recent(10)] == ["a", "c", "b"]
    assert [c.id for c in table.recent(2)] == ["a", "c"]
    assert table.recent(0) == []


# --- Reports that come twice, or late ------------------------------------------------------------


def test_a_turn_that_is_reported_twice_counts_once() -> None:
    """Reports are sent again when the table's process was lost under way."""
    table = a_table()
    first = turn(table, "c", 100, TAILS)
    running = start(table, "c")
    assert not first.advance(table, 700, OTHER_TAILS)
    assert first.abandon(table, stats(700)) is None
    conversation = the(table, "c")
    assert (conversation.turns, conversation.held_tokens) == (1, 110)
    assert conversation.phase == "reasoning"
    assert table.recognise(TAILS) == "c"
    assert table.recognise(OTHER_TAILS) is None
    assert running.advance(table, 200)
    assert held(table)["d1"] == (210, 1)


def test_a_decoder_holds_what_is_live_and_bound_to_it() -> None:
    table = a_table()
    first = turn(table, "c")
    assert table.holds(first.key, "d1")
    assert not table.holds(first.key, "d2")
    assert not table.holds(first.key._replace(incarnation=first.incarnation + 1), "d1")
    table.remove_decoder("d1")
    assert not table.holds(first.key, "d1")
    start(table, "c")
    assert table.holds(first.key, "d2")
    table.release("c")
    assert not table.holds(first.key, "d2")


def test_a_late_end_of_an_earlier_incarnation_changes_nothing() -> None:
    table = a_table()
    old = start(table, "c", 100)
    table.release("c")
    new = start(table, "c", 300)
    assert the(table, "c").incarnation != old.incarnation
    assert not old.advance(table, 700, TAILS)
    assert old.abandon(table) is None
    table.prefilled(old.key)
    assert held(table)["d1"] == (300, 1)
    assert table.prefillers["p1"].queued_tokens == 300
    assert table.reasoning == 1
    assert table.recognise(TAILS) is None
    assert new.advance(table, 300)


def test_ended_in_mid_turn() -> None:
    table = a_table()
    running = start(table, "c", 100)
    assert table.release("c") is not None
    assert held(table)["d1"] == (0, 0)
    assert table.prefillers["p1"].queued_tokens == 0
    assert table.reasoning == 0
    assert not running.advance(table, 100, TAILS)
    assert "c" not in table


# --- Turns that do not complete ------------------------------------------------------------------


def test_a_first_turn_that_never_reached_an_engine_leaves_nothing() -> None:
    table = a_table()
    first = start(table, "c", 100)
    ended = first.abandon(table)
    assert ended is not None
    assert ended.id == "c"
    assert ended.decoder_id == "d1"
    assert "c" not in table
    assert held(table)["d1"] == (0, 0)
    assert table.prefillers["p1"].queued_tokens == 0
    assert first.abandon(table) is None


def test_a_first_turn_cut_in_an_engine_keeps_its_tokens() -> None:
    """The client went away, but the KV is there for when it asks again."""
    table = a_table()
    assert start(table, "c", 100).abandon(table, stats(100, 7)) is None
    conversation = the(table, "c")
    assert (conversation.turns, conversation.held_tokens) == (0, 107)
    assert conversation.phase == "acting"
    assert table.begin("c", now_s=1) is conversation


def test_a_refused_later_turn_keeps_what_was_held() -> None:
    table = a_table()
    turn(table, "c", 100, TAILS)
    assert start(table, "c").abandon(table) is None
    assert the(table, "c").phase == "acting"
    assert held(table)["d1"] == (110, 1)
    assert table.recognise(TAILS) == "c"


def test_a_failed_first_turn_does_not_end_a_second_beside_it() -> None:
    table = a_table()
    first, second = start(table, "c"), start(table, "c")
    assert first.abandon(table) is None
    assert second.advance(table, 100)
    assert held(table)["d1"] == (110, 1)


# --- Engines come and go -------------------------------------------------------------------------


def test_a_conversation_outlives_its_decoder() -> None:
    table = a_table()
    turn(table, "c", 100, TAILS)
    assert table.remove_decoder("d1") == ["c"]
    assert table.recognise(TAILS) == "c"
    assert table.begin("c", now_s=1) is None
    assert table.bind("c", 150, now_s=1) == Placement("d2", "p1")
    assert held(table) == {"d2": (150, 1)}
    conversation = the(table, "c")
    assert (conversation.moves, conversation.turns) == (1, 1)


def test_turns_on_a_lost_decoder_are_over() -> None:
    table = a_table()
    turn(table, "c")
    lost = start(table, "c")
    table.remove_decoder("d1")
    assert the(table, "c").phase == "acting"
    assert table.reasoning == 0
    moved = start(table, "c", 150)
    assert not lost.advance(table, 900)
    assert lost.abandon(table, stats(900)) is None
    assert held(table) == {"d2": (150, 1)}
    assert table.reasoning == 1
    assert moved.advance(table, 150)
    assert the(table, "c").turns == 2


def test_a_late_report_of_a_lost_decoder_is_refused() -> None:
    table = a_table()
    turn(table, "c", 100, TAILS)
    lost = start(table, "c")
    table.remove_decoder("d1")
    # Whether the conversation is nowhere, elsewhere, or where it was, but without its KV.
    assert not lost.advance(table, 900, OTHER_TAILS)
    start(table, "c", 150)
    assert not lost.advance(table, 900, OTHER_TAILS)
    table.remove_decoder("d2")
    table.add_decoder("d1", 1000)
    again = start(table, "c", 160)
    assert again.decoder_id == lost.decoder_id
    assert not lost.advance(table, 900, OTHER_TAILS)
    conversation = the(table, "c")
    assert (conversation.turns, conversation.held_tokens) == (1, 160)
    assert conversation.tails == TAILS
    assert again.advance(table, 160)


def test_a_first_turn_lost_with_its_decoder_leaves_nothing_once_given_up() -> None:
    table = a_table()
    lost = start(table, "c")
    table.remove_decoder("d1")
    assert lost.abandon(table) is not None
    assert "c" not in table


def test_a_prefill_for_a_lost_decoder_is_not_queued_for_ever() -> None:
    table = a_table()
    start(table, "c", 100)
    table.remove_decoder("d1")
    moved = start(table, "c", 100)
    moved.advance(table, 100)
    assert table.prefillers["p1"].queued_tokens == 0


def test_a_prefiller_that_comes_back_has_an_empty_queue() -> None:
    table = a_table()
    running = start(table, "c", 100)
    table.remove_prefiller("p1")
    table.add_prefiller("p1")
    table.prefilled(running.key)
    assert table.prefillers["p1"].queued_tokens == 0


def test_a_later_turn_is_prefilled_where_the_policy_says() -> None:
    table = a_table(policy=FullDisaggregationPlacement())
    turn(table, "c", 100)
    running = start(table, "c")
    assert table.prefill_later_turn(the(table, "c")) == "p1"
    # It counts with what is known: the history.
    assert table.prefillers["p1"].queued_tokens == 110
    # A second turn beside it takes its place in the queue.
    second = start(table, "c")
    assert table.prefill_later_turn(the(table, "c")) == "p1"
    assert table.prefillers["p1"].queued_tokens == 110
    table.prefilled(running.key)
    assert table.prefillers["p1"].queued_tokens == 0
    assert table.prefill_later_turn(the(table, "c")) == "p1"
    assert second.advance(table, 150)
    assert table.prefillers["p1"].queued_tokens == 0


def test_by_default_a_later_turn_is_prefilled_by_its_decoder() -> None:
    table = a_table()
    turn(table, "c", 100)
    start(table, "c")
    assert table.prefill_later_turn(the(table, "c")) is None
    assert table.prefillers["p1"].queued_tokens == 0


def test_ttfet_outlives_a_decoder_that_was_away() -> None:
    table = a_table(decoders=1)
    assert table.bind("c", 100, 7.0, arrived_s=2.0) is not None
    running = Turn.last(table, "c")
    assert running.advance(table, 100)
    assert table.answered(running.key, 5.0) == 3.0
    account = [copy.copy(the(table, "c"))]
    account[0].asked_s = account[0].ttfet_s = None  # A decoder does not know them.
    table.remove_decoder("d1")
    table.add_decoder("d1", 1000, account)
    assert binding(table, "c") == "d1"
    assert the(table, "c").ttfet_s == 3.0
    assert table.answered(running.key, 9.0) is None


def test_an_engine_that_reports_twice_keeps_its_state() -> None:
    table = a_table()
    start(table, "c", 100)
    table.add_prefiller("p1")
    # It is not to forget what it tells of: that is its own still.
    assert table.add_decoder("d1", 1000, [copy.copy(the(table, "c"))]) == []
    assert table.prefillers["p1"].queued_tokens == 100
    assert held(table)["d1"] == (100, 1)


def test_unknown_engines_can_be_lost() -> None:
    table = a_table()
    assert table.remove_decoder("nobody") == []
    table.remove_prefiller("nobody")


def test_no_conversation_goes_to_a_lost_engine() -> None:
    table = a_table(decoders=2, prefillers=2)
    table.remove_decoder("d1")
    table.remove_prefiller("p1")
    assert table.bind("c", 100, now_s=0) == Placement("d2", "p2")


# --- Idle ones -----------------------------------------------------------------------------------


def test_idle_ones_end_the_longest_unused_first() -> None:
    table = a_table()
    for now_s, conversation_id in enumerate("abc"):
        turn(table, conversation_id, now_s=now_s)
    turn(table, "a", now_s=10)
    assert table.expire(1 + IDLE_S - 0.01) == []
    assert [c.id for c in table.expire(2 + IDLE_S)] == ["b", "c"]
    assert table.expire(9 + IDLE_S) == []
    turn(table, "d", now_s=10.5)
    assert [c.id for c in table.expire(11 + IDLE_S)] == ["a", "d"]
    assert held(table) == {"d1": (0, 0), "d2": (0, 0)}


def test_a_turn_longer_than_the_idle_time_is_not_ended() -> None:
    table = a_table()
    long = start(table, "long", now_s=0)
    lost = start(table, "lost", now_s=0)
    assert table.expire(IDLE_S) == []
    assert table.expire(IDLE_S + TURN_S - 0.01) == []
    assert long.advance(table, 100, now_s=IDLE_S + TURN_S - 0.01)
    # A turn of which nothing is heard for that long is lost.
    assert [c.id for c in table.expire(IDLE_S + TURN_S)] == ["lost"]
    assert not lost.advance(table, 100)
    assert table.expire(2 * IDLE_S + TURN_S - 0.02) == []
    assert [c.id for c in table.expire(2 * IDLE_S + TURN_S)] == ["long"]


def test_one_whose_turn_was_lost_with_its_decoder_is_not_spared() -> None:
    table = a_table()
    start(table, "c", now_s=0)
    assert table.expire(IDLE_S) == []
    table.remove_decoder("d1")
    assert [c.id for c in table.expire(IDLE_S)] == ["c"]


def test_an_idle_time_shorter_than_a_period_is_kept_to() -> None:
    table = ConversationTable(ConversationPlacement(), 0.1)
    table.add_decoder("d1", 1000)
    turn(table, "c", now_s=7.2)
    assert table.expire(7.29) == []
    assert [c.id for c in table.expire(7.3)] == ["c"]


def listed(table: ConversationTable) -> list[str]:
    """The ids that `expire` keeps, in all periods."""
    return [id for ids in table._looks.values() for id in ids]


def test_the_table_does_not_grow_by_what_has_ended() -> None:
    table = a_table()
    turn(table, "stays", now_s=1)
    for i in range(5000):
        turn(table, f"c{i}", now_s=i / 100)
        table.release(f"c{i}")
        # One period's may come on top until its turn comes.
        assert table._listed <= 1200
    assert "stays" in listed(table)
    assert table._listed == len(listed(table))
    assert [c.id for c in table.expire(50 + IDLE_S)] == ["stays"]
    assert table._listed == len(table._looks) == 0


def test_the_table_does_not_grow_by_decoders_that_come_and_go() -> None:
    table = a_table()
    turn(table, "c", now_s=1)
    for _ in range(10):
        account = [copy.copy(the(table, "c"))]
        table.remove_decoder("d1")
        table.add_decoder("d1", 1000, account)
    assert listed(table) == ["c"]
    assert [c.id for c in table.expire(1 + IDLE_S)] == ["c"]


def test_unbound_ones_end_too() -> None:
    table = a_table()
    turn(table, "c", now_s=0, tails=TAILS)
    table.remove_decoder("d1")
    assert [c.id for c in table.expire(IDLE_S)] == ["c"]
    assert table.recognise(TAILS) is None


# --- Recognition ---------------------------------------------------------------------------------


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


# --- A table after another -----------------------------------------------------------------------


class Decoders:
    """Two decoders' own accounts, kept beside a table as `TurnObserver` does."""

    def __init__(self, table: ConversationTable) -> None:
        self.table = table
        self.holdings = {decoder_id: Holdings() for decoder_id in table.decoders}

    def turn(self, conversation_id: str, tokens: int, tails: tuple[bytes, ...]) -> None:
        started = start(self.table, conversation_id, tokens)
        own = self.holdings[binding(self.table, conversation_id) or ""]
        own.begin(started.key)
        own.finish(started.key, stats(tokens), tails, completed=True)
        started.advance(self.table, tokens, tails)

    def leave_running(self, conversation_id: str) -> Turn:
        started = start(self.table, conversation_id)
        own = self.holdings[binding(self.table, conversation_id) or ""]
        own.begin(started.key)
        return started


def successor(
    accounts: Iterable[tuple[str, list[Conversation]]], first_id: int = 10_000
) -> ConversationTable:
    table = ConversationTable(ConversationPlacement(), IDLE_S, TURN_S, first_id)
    table.add_prefiller("p1")
    for decoder_id, holds in accounts:
        assert table.add_decoder(decoder_id, 1000, holds) == []
    return table


def test_a_lost_table_is_rebuilt_from_what_decoders_hold() -> None:
    table = a_table()
    decoders = Decoders(table)
    for i in range(5):
        decoders.turn(f"c{i}", 100 + 7 * i, (bytes([i]) * 16,))
    decoders.turn("c3", 190, (b"n" * 16,))
    running = decoders.leave_running("c1")
    for order in (1, -1):
        accounts = [(d, own.all()) for d, own in decoders.holdings.items()]
        rebuilt = successor(accounts[::order])
        assert len(rebuilt) == 5
        assert held(rebuilt) == held(table)
        assert rebuilt.reasoning == 1
        for i in range(5):
            old, new = the(table, f"c{i}"), the(rebuilt, f"c{i}")
            assert (new.decoder_id, new.held_tokens) == (old.decoder_id, old.held_tokens)
            assert (new.turns, new.incarnation) == (old.turns, old.incarnation)
            assert new.last_turn == old.last_turn
            assert rebuilt.recognise([old.tails[0]]) == f"c{i}"
        # The turn that was under way ends in the new table, and new turns are told apart from it.
        assert start(rebuilt, "c1").id not in (running.id, running.incarnation)
        assert running.advance(rebuilt, 150)
        assert the(rebuilt, "c1").phase == "reasoning"


def test_a_turn_begun_under_a_lost_table_counts_in_the_rebuilt_one() -> None:
    """The request was on its way to the decoder when that told what it holds."""
    table = a_table()
    decoders = Decoders(table)
    decoders.turn("c", 100, TAILS)
    under_way = start(table, "c")
    rebuilt = successor((d, own.all()) for d, own in decoders.holdings.items())
    assert the(rebuilt, "c").running == ()
    assert under_way.advance(rebuilt, 150, OTHER_TAILS, now_s=5)
    conversation = the(rebuilt, "c")
    assert (conversation.turns, conversation.held_tokens) == (2, 160)
    assert (conversation.phase, conversation.last_used_s) == ("acting", 5)
    assert rebuilt.recognise(OTHER_TAILS) == "c"
    assert rebuilt.recognise(TAILS) is None
    assert held(rebuilt)["d1"] == (160, 1)
    assert rebuilt.reasoning == 0
    # Reported again, and followed by a turn that is told apart from it.
    assert not under_way.advance(rebuilt, 700, TAILS)
    assert start(rebuilt, "c").id > under_way.id


def test_a_turn_begun_under_a_lost_table_and_broken_off_leaves_its_tokens() -> None:
    table = a_table()
    decoders = Decoders(table)
    decoders.turn("c", 100, TAILS)
    cut = start(table, "c")
    rebuilt = successor((d, own.all()) for d, own in decoders.holdings.items())
    # A router knows nothing of tokens, and another decoder nothing of this conversation's.
    assert cut.abandon(rebuilt) is None
    assert replace(cut, decoder_id="d2").abandon(rebuilt, stats(700)) is None
    assert held(rebuilt)["d1"] == (110, 1)
    assert cut.abandon(rebuilt, stats(150, 3), now_s=5) is None
    conversation = the(rebuilt, "c")
    assert (conversation.turns, conversation.held_tokens) == (1, 153)
    assert held(rebuilt)["d1"] == (153, 1)
    assert cut.abandon(rebuilt, stats(700)) is None
    assert the(rebuilt, "c").held_tokens == 153
    assert start(rebuilt, "c").id > cut.id


def test_a_turn_counted_by_its_decoder_is_not_counted_again_after_the_tables_loss() -> None:
    table = a_table()
    decoders = Decoders(table)
    decoders.turn("c", 100, TAILS)
    decoders.turn("c", 150, OTHER_TAILS)
    last = Turn("c", the(table, "c").incarnation, the(table, "c").finished, "d1")
    rebuilt = successor((d, own.all()) for d, own in decoders.holdings.items())
    # The decoder sends it again: the table was lost before it had answered.
    assert not last.advance(rebuilt, 150, OTHER_TAILS)
    assert rebuilt.holds(last.key, "d1")
    assert (the(rebuilt, "c").turns, the(rebuilt, "c").held_tokens) == (2, 160)


def test_a_rebuilt_table_ends_idle_ones() -> None:
    def account(conversation_id: str, last_used_s: float) -> Conversation:
        return Conversation(conversation_id, 1, 0, last_used_s, packed_last_turn=stats(10).pack())

    rebuilt = successor([("d1", [account("a", 30), account("b", 10)]), ("d2", [account("c", 20)])])
    assert [c.id for c in rebuilt.recent(3)] == ["a", "c", "b"]
    assert [c.id for c in rebuilt.expire(20 + IDLE_S)] == ["b", "c"]


def test_a_decoder_thought_lost_gets_its_conversations_back() -> None:
    table = a_table()
    turn(table, "c", 100, TAILS)
    account = [copy.copy(the(table, "c"))]
    table.remove_decoder("d1")
    assert table.add_decoder("d1", 1000, account) == []
    assert held(table)["d1"] == (110, 1)
    assert the(table, "c").moves == 0
    assert table.begin("c", now_s=1) is not None
    assert table.recognise(TAILS) == "c"


def test_a_decoder_forgets_what_moved_elsewhere_meanwhile() -> None:
    table = a_table()
    turn(table, "moved", 100)
    table.bind("spacer", 300, now_s=0)
    turn(table, "again", 50)
    lost = [table.get("moved"), table.get("again")]
    account = [copy.copy(c) for c in lost if c is not None]
    assert {c.decoder_id for c in account} == {"d1"}
    table.remove_decoder("d1")
    start(table, "moved", 120)
    # The same id, but another conversation since.
    table.release("again")
    start(table, "again", 70)
    assert table.add_decoder("d1", 1000, account) == ["moved", "again"]
    assert held(table) == {"d1": (0, 0), "d2": (490, 3)}


def test_an_earlier_conversation_of_the_same_id_is_not_revived() -> None:
    table = a_table()
    turn(table, "c", 100)
    account = [copy.copy(the(table, "c"))]
    table.remove_decoder("d1")
    table.release("c")
    turn(table, "c", 50)
    table.remove_decoder("d2")
    assert table.add_decoder("d1", 1000, account) == ["c"]
    assert the(table, "c").decoder_id is None
    assert held(table) == {"d1": (0, 0)}


def test_a_conversations_history_outlasts_its_decoders_return() -> None:
    table = a_table()
    turn(table, "c", 100, now_s=1)
    table.remove_decoder("d1")
    turn(table, "c", 120, now_s=2)
    # What d2 knows: its own part of the conversation.
    own = copy.copy(the(table, "c"))
    own.created_s, own.turns, own.moves = 2, 1, 0
    table.remove_decoder("d2")
    table.add_decoder("d2", 1000, [own])
    conversation = the(table, "c")
    assert (conversation.turns, conversation.moves, conversation.created_s) == (2, 1, 1)
    assert conversation.decoder_id == "d2"


def test_a_successors_numbers_are_above_those_it_hears_of() -> None:
    account = Conversation("c", 900, 0, 0, running=(905,), packed_last_turn=stats(10).pack())
    other = Conversation("o", 901, 0, 0, finished=908, packed_last_turn=stats(10).pack())
    rebuilt = successor([("d1", [account, other])], first_id=902)
    assert start(rebuilt, "new").id > 908
    assert the(rebuilt, "new").incarnation > 908
    assert Turn("c", 900, 950, "d1").advance(rebuilt, 10)
    assert start(rebuilt, "c").id > 950


# --- Any order of events -------------------------------------------------------------------------


@dataclass
class Known:
    """A conversation in the naive model."""

    incarnation: int
    last_used_s: float
    decoder: str | None = None
    held: int = 0
    turns: int = 0
    moves: int = 0
    running: set[int] = field(default_factory=set)
    prefill: tuple[str, int] | None = None
    reached: bool = False
    tails: tuple[bytes, ...] = ()
    finished: int = 0
    promised: bool = False


IDS = st.sampled_from("abcde")
TOKENS = st.integers(1, 400)
DIGESTS = st.sampled_from([b"x" * 16, b"y" * 16, b"z" * 16])
DECODER_IDS = st.sampled_from(["d1", "d2", "d3"])
PREFILLER_IDS = st.sampled_from(["p1", "p2"])
CAPACITY = {"d1": 800, "d2": 1000, "d3": 500}


class AnyOrder(RuleBasedStateMachine):
    """The table against a model that adds everything up anew each time it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.first_id = 1
        self.table = ConversationTable(ConversationPlacement(), IDLE_S, TURN_S)
        self.known: dict[str, Known] = {}
        self.decoders: set[str] = set()
        self.prefillers: set[str] = set()
        self.history: list[Turn] = []
        self.accounts: dict[str, list[Conversation]] = {}  # of decoders that are away
        self.now_s = 0.0

    # What the model says.

    def on(self, decoder_id: str) -> list[Known]:
        return [k for k in self.known.values() if k.decoder == decoder_id]

    def tokens_on(self, decoder_id: str) -> int:
        return sum(k.held for k in self.on(decoder_id))

    def current(self, reported: Turn) -> Known | None:
        known = self.known.get(reported.conversation_id)
        return known if known and known.incarnation == reported.incarnation else None

    def started(self, conversation_id: str) -> None:
        started = Turn.last(self.table, conversation_id)
        assert all(started.id != earlier.id for earlier in self.history)
        self.history.append(started)
        known = self.known[conversation_id]
        known.running.add(started.id)
        known.last_used_s = self.now_s

    def ended(self, known: Known, reported: Turn, seen: TurnStats | None) -> None:
        known.running.discard(reported.id)
        known.finished = max(known.finished, reported.id)
        known.prefill = None
        known.last_used_s = self.now_s
        if seen is not None:
            known.reached = True
            known.promised = False
            known.held = seen.prompt_tokens + seen.output_tokens

    # What happens.

    @rule(seconds=st.sampled_from([0.5, 20.0, 60.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(conversation_id=IDS, tokens=TOKENS)
    def bind(self, conversation_id: str, tokens: int) -> None:
        known = self.known.get(conversation_id)
        if known is not None and known.decoder is not None:
            with pytest.raises(ValueError, match="is bound"):
                self.table.bind(conversation_id, tokens, self.now_s)
            return
        fitting = {
            d: self.tokens_on(d) / CAPACITY[d]
            for d in self.decoders
            if not self.on(d) or self.tokens_on(d) + tokens <= CAPACITY[d]
        }
        placement = self.table.bind(conversation_id, tokens, self.now_s)
        if placement is None:
            assert not fitting
            return
        assert fitting[placement.decoder_id] == min(fitting.values())
        assert (placement.prefiller_id is None) == (not self.prefillers)
        if known is None:
            incarnation = the(self.table, conversation_id).incarnation
            known = self.known[conversation_id] = Known(incarnation, self.now_s)
        else:
            known.moves += 1
        known.decoder, known.held, known.promised = placement.decoder_id, tokens, True
        known.prefill = (placement.prefiller_id, tokens) if placement.prefiller_id else None
        self.started(conversation_id)

    @rule(conversation_id=IDS)
    def begin(self, conversation_id: str) -> None:
        known = self.known.get(conversation_id)
        begun = self.table.begin(conversation_id, self.now_s)
        assert (begun is not None) == (known is not None and known.decoder is not None)
        if begun is not None:
            self.started(conversation_id)

    @precondition(lambda self: self.history)
    @rule(data=st.data())
    def prefilled(self, data: st.DataObject) -> None:
        reported = data.draw(st.sampled_from(self.history))
        self.table.prefilled(reported.key)
        known = self.current(reported)
        if known is not None:
            known.prefill = None

    @precondition(lambda self: self.history)
    @rule(data=st.data(), tokens=TOKENS, tails=st.lists(DIGESTS, max_size=2, unique=True))
    def advance(self, data: st.DataObject, tokens: int, tails: list[bytes]) -> None:
        reported = data.draw(st.sampled_from(self.history))
        known = self.current(reported)
        counts = (
            known is not None
            and known.decoder == reported.decoder_id
            and (reported.id in known.running or reported.id > known.finished)
        )
        assert reported.advance(self.table, tokens, tuple(tails), self.now_s) == counts
        if known is not None and counts:
            known.turns += 1
            known.tails = tuple(tails) or known.tails
            self.ended(known, reported, stats(tokens))

    @precondition(lambda self: self.history)
    @rule(data=st.data(), tokens=st.none() | TOKENS)
    def abandon(self, data: st.DataObject, tokens: int | None) -> None:
        reported = data.draw(st.sampled_from(self.history))
        known = self.current(reported)
        seen = None if tokens is None else stats(tokens)
        ended = reported.abandon(self.table, seen, self.now_s)
        if known is not None and (
            reported.id in known.running
            or (seen and reported.id > known.finished and reported.decoder_id == known.decoder)
        ):
            self.ended(known, reported, seen)
        nothing_left = known is not None and not known.reached and not known.running
        assert (ended is not None) == nothing_left
        if nothing_left:
            del self.known[reported.conversation_id]
        elif known is not None and not known.running and known.promised:
            known.decoder, known.held, known.promised = None, 0, False

    @rule(conversation_id=IDS)
    def release(self, conversation_id: str) -> None:
        released = self.table.release(conversation_id)
        assert (released is not None) == (self.known.pop(conversation_id, None) is not None)

    @rule()
    def expire(self) -> None:
        idle = {
            i
            for i, k in self.known.items()
            if k.last_used_s + IDLE_S + (TURN_S if k.running else 0) <= self.now_s
        }
        ended = self.table.expire(self.now_s)
        assert {c.id for c in ended} == idle
        assert [c.last_used_s for c in ended] == sorted(c.last_used_s for c in ended)
        for conversation_id in idle:
            del self.known[conversation_id]

    @rule(prefiller_id=PREFILLER_IDS)
    def add_prefiller(self, prefiller_id: str) -> None:
        self.table.add_prefiller(prefiller_id)
        self.prefillers.add(prefiller_id)

    @rule(prefiller_id=PREFILLER_IDS)
    def remove_prefiller(self, prefiller_id: str) -> None:
        self.table.remove_prefiller(prefiller_id)
        self.prefillers.discard(prefiller_id)
        for known in self.known.values():
            if known.prefill and known.prefill[0] == prefiller_id:
                known.prefill = None

    def account_of(self, decoder_id: str, arrived: bool = True) -> list[Conversation]:
        """What the decoder would say that it holds.

        Args:
            arrived: whether the turns under way have reached it.
        """
        account = []
        for conversation in self.table.recent(len(self.table)):
            if conversation.decoder_id == decoder_id:
                own = copy.copy(conversation)
                if not arrived:
                    own.running = ()
                    if own.last_turn is None:
                        continue
                own.prefiller_id, own.prefill_tokens, own.decoder_id = None, 0, None
                own.moves = 0
                if own.promised:
                    own.held_tokens = 0  # a decoder has not heard of what was promised for it
                account.append(own)
        return account

    def adopted(self, decoder_id: str, account: list[Conversation]) -> list[str]:
        """Take an account over into the model; returns those that live elsewhere or ended."""
        foreign = []
        for own in account:
            known = self.known.get(own.id)
            if known is None and own.incarnation >= self.first_id:
                foreign.append(own.id)
                continue
            if known is not None and (known.decoder or known.incarnation != own.incarnation):
                foreign.append(own.id)
                continue
            self.known[own.id] = Known(
                own.incarnation,
                own.last_used_s,
                decoder_id,
                own.held_tokens,
                max(own.turns, known.turns if known else 0),
                known.moves if known else 0,
                set(own.running),
                None,
                own.last_turn is not None,
                own.tails,
                own.finished,
            )
        return foreign

    @rule(decoder_id=DECODER_IDS, remembers=st.booleans())
    def add_decoder(self, decoder_id: str, remembers: bool) -> None:
        """A new decoder, or one that was thought lost and comes back with what it holds."""
        if decoder_id in self.decoders:
            return
        account = self.accounts.pop(decoder_id, [])
        if not remembers:
            account = []
        self.decoders.add(decoder_id)
        given = [copy.copy(own) for own in account]
        foreign = self.table.add_decoder(decoder_id, CAPACITY[decoder_id], given)
        assert foreign == self.adopted(decoder_id, account)

    @rule(decoder_id=DECODER_IDS)
    def remove_decoder(self, decoder_id: str) -> None:
        if decoder_id in self.decoders:
            self.accounts[decoder_id] = self.account_of(decoder_id)
        unbound = self.table.remove_decoder(decoder_id)
        self.decoders.discard(decoder_id)
        assert sorted(unbound) == sorted(
            i for i, k in self.known.items() if k.decoder == decoder_id
        )
        for known in self.on(decoder_id):
            known.decoder, known.held = None, 0
            known.finished = max(known.finished, *known.running, 0)
            known.running.clear()

    @rule(order=st.permutations(sorted(CAPACITY)), arrived=st.booleans())
    def lose_the_table(self, order: list[str], arrived: bool) -> None:
        accounts = {d: self.account_of(d, arrived) for d in order if d in self.decoders}
        highest = max((t.id for t in self.history), default=0)
        self.first_id = highest + 1
        self.table = ConversationTable(ConversationPlacement(), IDLE_S, TURN_S, self.first_id)
        self.known.clear()
        for prefiller_id in self.prefillers:
            self.table.add_prefiller(prefiller_id)
        for decoder_id, account in accounts.items():
            given = [copy.copy(own) for own in account]
            assert self.table.add_decoder(decoder_id, CAPACITY[decoder_id], given) == []
            self.adopted(decoder_id, account)

    @rule(digest=DIGESTS)
    def recognise(self, digest: bytes) -> None:
        owners = {i for i, k in self.known.items() if digest in k.tails}
        idle = {i for i in owners if not self.known[i].running}
        found = self.table.recognise([digest])
        if owners:
            assert found in (idle or owners)
        else:
            assert found is None

    # What must hold after each.

    @invariant()
    def each_conversation_is_as_the_model_has_it(self) -> None:
        assert len(self.table) == len(self.known)
        for conversation_id, known in self.known.items():
            conversation = the(self.table, conversation_id)
            assert conversation.decoder_id == known.decoder
            assert conversation.incarnation == known.incarnation
            assert conversation.held_tokens == known.held
            assert conversation.turns == known.turns
            assert conversation.moves == known.moves
            assert set(conversation.running) == known.running
            assert conversation.finished == known.finished
            assert conversation.last_used_s == known.last_used_s
            assert conversation.phase == ("reasoning" if known.running else "acting")

    @invariant()
    def each_decoder_holds_its_conversations_tokens(self) -> None:
        assert set(self.table.decoders) == self.decoders
        for decoder_id, (tokens, conversations) in held(self.table).items():
            assert tokens == self.tokens_on(decoder_id)
            assert conversations == len(self.on(decoder_id))

    @invariant()
    def each_prefiller_has_its_pending_prefills_queued(self) -> None:
        queued = dict.fromkeys(self.prefillers, 0)
        for known in self.known.values():
            if known.prefill is not None and known.prefill[0] in queued:
                queued[known.prefill[0]] += known.prefill[1]
        assert {p.id: p.queued_tokens for p in self.table.prefillers.values()} == queued

    @invariant()
    def each_conversation_is_to_be_looked_at(self) -> None:
        assert set(listed(self.table)) >= set(self.known)
        assert self.table._listed == len(listed(self.table))

    @invariant()
    def reasoning_ones_are_counted(self) -> None:
        assert self.table.reasoning == sum(bool(k.running) for k in self.known.values())

    def teardown(self) -> None:
        for conversation_id in list(self.known):
            self.table.release(conversation_id)
        assert len(self.table) == self.table.reasoning == 0
        assert set(held(self.table).values()) <= {(0, 0)}
        assert not any(p.queued_tokens for p in self.table.prefillers.values())
        assert self.table.recognise([b"x" * 16, b"y" * 16, b"z" * 16]) is None


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_a_conversation_that_ended_while_its_decoder_was_away_stays_ended() -> None:
    table = a_table()
    turn(table, "c", 100, TAILS)
    account = [copy.copy(the(table, "c"))]
    table.remove_decoder("d1")
    table.release("c")
    assert table.add_decoder("d1", 1000, account) == ["c"]
    assert held(table)["d1"] == (0, 0)
    assert table.get("c") is None


def test_a_promise_that_never_arrived_is_no_occupancy() -> None:
    """Bound again after its decoder was lost, and its client left before the new one had it."""
    table = a_table()
    turn(table, "c", 100, TAILS)
    table.remove_decoder("d1")
    moved = start(table, "c", 150)
    assert held(table)["d2"] == (150, 1)
    assert moved.abandon(table) is None
    assert held(table)["d2"] == (0, 0)
    assert table.begin("c", now_s=1) is None
    assert table.bind("c", 160, now_s=2) is not None
