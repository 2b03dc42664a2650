"""Decoders' reports of what they hold: to a new table, or when they return to one."""

import copy
from collections.abc import Iterable
from dataclasses import replace

from conserve.conversations import ConversationTable
from conserve.history import History
from conserve.holdings import Holdings
from conserve.placement import ConversationPlacement
from tests.unit.conserve.conversations.scene import (
    IDLE_S,
    OTHER_TAILS,
    TAILS,
    TURN_S,
    Turn,
    a_table,
    binding,
    chain,
    held,
    start,
    stats,
    the,
    turn,
)


class Decoders:
    """Two decoders' own accounts, kept beside a table as `EngineTurns` does."""

    def __init__(self, table: ConversationTable) -> None:
        self.table = table
        self.holdings = {decoder_id: Holdings() for decoder_id in table.decoders}

    def turn(self, history_id: str, tokens: int, tails: tuple[bytes, ...]) -> None:
        started = start(self.table, history_id, tokens)
        own = self.holdings[binding(self.table, history_id) or ""]
        history = the(self.table, history_id)
        own.begin(started.key, history.root, history.points)
        own.finish(started.key, stats(tokens), tails, completed=True)
        started.advance(self.table, tokens, tails)

    def leave_running(self, history_id: str) -> Turn:
        started = start(self.table, history_id)
        own = self.holdings[binding(self.table, history_id) or ""]
        own.begin(started.key)
        return started


def successor(
    accounts: Iterable[tuple[str, list[History]]], first_id: int = 10_000
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
            assert (new.home, new.held_tokens) == (old.home, old.held_tokens)
            assert (new.turns, new.incarnation) == (old.turns, old.incarnation)
            assert new.last_turn == old.last_turn
            assert rebuilt.recognise(chain(f"c{i}", old.tails), f"c{i}") == (
                None if old.running else f"c{i}"
            )
        # The turn that was under way ends in the new table, and new turns are told apart from it.
        assert start(rebuilt, "c1").id not in (running.id, running.incarnation)
        assert running.advance(rebuilt, 150)
        assert the(rebuilt, "c1").running


def test_a_turn_begun_under_a_lost_table_counts_in_the_rebuilt_one() -> None:
    """The request was on its way to the decoder when that reported what it holds."""
    table = a_table()
    decoders = Decoders(table)
    decoders.turn("c", 100, TAILS)
    under_way = start(table, "c")
    rebuilt = successor((d, own.all()) for d, own in decoders.holdings.items())
    assert the(rebuilt, "c").running == ()
    assert under_way.advance(rebuilt, 150, OTHER_TAILS, now_s=5)
    conversation = the(rebuilt, "c")
    assert (conversation.turns, conversation.held_tokens) == (2, 160)
    assert (conversation.running, conversation.last_used_s) == ((), 5)
    assert rebuilt.recognise(chain("c", OTHER_TAILS), "c") == "c"
    assert rebuilt.recognise(chain("c", TAILS), "c") is None
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
    def account(history_id: str, last_used_s: float) -> History:
        return History(history_id, 1, 0, last_used_s, packed=stats(10).pack())

    rebuilt = successor([("d1", [account("a", 30), account("b", 10)]), ("d2", [account("c", 20)])])
    assert {c.id for c in rebuilt.live()} == {"a", "b", "c"}
    assert [c.id for c in rebuilt.expire(20 + IDLE_S)] == ["b", "c"]


def test_a_decoder_thought_lost_gets_its_conversations_back() -> None:
    table = a_table()
    turn(table, "c", 100, TAILS)
    account = [copy.copy(the(table, "c"))]
    table.remove_engine("d1")
    assert table.add_decoder("d1", 1000, account) == []
    assert held(table)["d1"] == (110, 1)
    assert the(table, "c").moves == 0
    assert table.recognise(chain("c", TAILS), "c") == "c"
    assert table.begin("c", now_s=1) is not None


def test_a_decoder_forgets_what_moved_elsewhere_meanwhile() -> None:
    table = a_table()
    turn(table, "moved", 100)
    table.bind("spacer", 300, now_s=0)
    turn(table, "again", 50)
    lost = [table.get("moved"), table.get("again")]
    account = [copy.copy(c) for c in lost if c is not None]
    assert {c.home for c in account} == {"d1"}
    table.remove_engine("d1")
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
    table.remove_engine("d1")
    table.release("c")
    turn(table, "c", 50)
    table.remove_engine("d2")
    assert table.add_decoder("d1", 1000, account) == ["c"]
    assert the(table, "c").home is None
    assert held(table) == {"d1": (0, 0)}


def test_a_conversations_history_outlasts_its_decoders_return() -> None:
    table = a_table()
    turn(table, "c", 100, now_s=1)
    table.remove_engine("d1")
    turn(table, "c", 120, now_s=2)
    # What d2 knows: its own part of the conversation.
    own = copy.copy(the(table, "c"))
    own.created_s, own.turns, own.moves = 2, 1, 0
    table.remove_engine("d2")
    table.add_decoder("d2", 1000, [own])
    conversation = the(table, "c")
    assert (conversation.turns, conversation.moves, conversation.created_s) == (2, 1, 1)
    assert conversation.home == "d2"


def test_a_successors_numbers_are_above_those_it_hears_of() -> None:
    account = History("c", 900, 0, 0, running=(905,), packed=stats(10).pack())
    other = History("o", 901, 0, 0, finished=908, packed=stats(10).pack())
    rebuilt = successor([("d1", [account, other])], first_id=902)
    assert start(rebuilt, "new").id > 908
    assert the(rebuilt, "new").incarnation > 908
    assert Turn("c", 900, 950, "d1").advance(rebuilt, 10)
    assert start(rebuilt, "c").id > 950


def test_a_conversation_that_ended_while_its_decoder_was_away_stays_ended() -> None:
    table = a_table()
    turn(table, "c", 100, TAILS)
    account = [copy.copy(the(table, "c"))]
    table.remove_engine("d1")
    table.release("c")
    assert table.add_decoder("d1", 1000, account) == ["c"]
    assert held(table)["d1"] == (0, 0)
    assert table.get("c") is None
