"""Pausing: just enough histories are paused, and found again when they come back."""

import copy
import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conserve.conversations import ConversationTable
from conserve.conversations.ledger import RECENT_S
from conserve.hints import Hints
from conserve.histories.kinship import Opening
from conserve.histories.prefixes import Going, Prefix
from conserve.history import History
from conserve.pausing import Idle, Pausing
from conserve.placement import ConversationPlacement, Placement
from conserve.turn import TurnStats
from tests.unit.conserve.conversations.scene import Turn, a_table, chain, start, the
from tests.unit.conserve.pausing.scene import (
    LONG_AGO_S,
    NOW_S,
    alike,
    bound,
    ends,
    idle,
    memory_of,
    paused,
    relieve,
)


def test_new_work_never_waits_for_what_is_idle() -> None:
    """Ninety chats of one turn fill two decoders; the next one starts at once."""
    table = a_table(capacity_tokens=4500, pausing=Pausing())
    for number in range(90):
        idle(table, f"chat-{number}", 100)
    assert {one.held_tokens for one in table.decoders.values()} == {4500}
    assert table.bind("next", 600, NOW_S) is not None
    assert len(paused(table)) == 6
    assert sum(one.held_tokens for one in table.decoders.values()) == 9000
    assert memory_of(table).pauses == {"room": 6}
    assert memory_of(table).paused_tokens == 600


def test_a_turn_that_runs_is_never_paused() -> None:
    table = a_table(decoders=1, pausing=Pausing())
    start(table, "a", 500)
    start(table, "b", 400)
    assert table.bind("c", 200, NOW_S) is None
    assert paused(table) == set()
    Turn.last(table, "a").advance(table, 500, (b"a" * 16,))
    assert table.bind("c", 200, NOW_S + 1) is not None
    assert paused(table) == {"a"}


def test_who_will_be_back_soon_keeps_its_room() -> None:
    """Else it would be computed again for nothing; the new prompt waits."""
    table = a_table(decoders=1, pausing=Pausing())
    idle(table, "away", 450)
    idle(table, "soon", 450, NOW_S - 1)
    assert table.bind("one", 300, NOW_S) is not None
    assert paused(table) == {"away"}
    assert table.bind("two", 400, NOW_S) is None
    # Half a second passes before it is looked again.
    assert table.bind("two", 400, NOW_S + 0.4) is None
    assert table.bind("two", 400, NOW_S + 900) is not None
    assert paused(table) == {"away", "soon"}


def test_a_background_history_gives_up_its_room_for_an_interactive_prompt() -> None:
    table = a_table(decoders=1, pausing=Pausing())
    background = Opening(hints=Hints(priority=-1))
    start(table, "runs", 100)
    for name, opening in (("soon", None), ("behind", background)):
        assert table.bind(name, 400, 0.0, opening=opening) is not None
        Turn.last(table, name).advance(table, 400, now_s=NOW_S - 1)
    assert table.bind("too", 300, NOW_S, opening=background) is None
    assert table.bind("one", 300, NOW_S) is not None
    assert paused(table) == {"behind"}
    assert table.bind("two", 300, NOW_S) is None


def test_a_prompt_takes_the_room_of_tenants_that_lead_its_own() -> None:
    table = a_table(decoders=1, pausing=Pausing())
    table.leads = lambda history_id, _: (
        {"a": 9_000.0, "c": -9_000.0} if history_id[0] == "b" else {}
    )
    for name in ("a\tsoon", "b\tsoon", "c\tsoon"):
        idle(table, name, 250, NOW_S - 1)
    start(table, "b\truns", 200)
    assert table.bind("a\tnew", 300, NOW_S) is None
    assert table.bind("b\ttoo long", 400, NOW_S) is None
    assert table.bind("b\tnew", 300, NOW_S) is not None
    assert paused(table) == {"a\tsoon"}
    # In the end it takes that of any, but not of one that was served less.
    Turn.last(table, "b\tnew").advance(table, 290, now_s=NOW_S)
    assert table.bind("a\tsoon", 750, NOW_S + 50, arrived_s=NOW_S) is not None
    assert paused(table) == {"b\tsoon", "b\tnew", "c\tsoon"}
    for name in ("a\tsoon", "b\truns"):
        Turn.last(table, name).advance(table, 100, now_s=NOW_S)
    assert table.bind("c\tsoon", 300, NOW_S + 60) is not None
    Turn.last(table, "c\tsoon").advance(table, 290, now_s=NOW_S + 60)
    start(table, "a\tsoon", 100, NOW_S + 60)
    assert table.bind("b\tsoon", 700, NOW_S + 120, arrived_s=NOW_S) is None


def test_who_was_paused_is_back_in_bounded_time() -> None:
    table = a_table(decoders=1, pausing=Pausing(patience_s=30))
    idle(table, "back", 450)
    idle(table, "soon", 450, NOW_S - 1)
    start(table, "runs", 300, NOW_S)
    assert paused(table) == {"back"}
    assert table.bind("back", 460, NOW_S, arrived_s=NOW_S) is None
    assert table.bind("new", 460, NOW_S + 29, arrived_s=NOW_S - 50) is None
    assert table.bind("back", 460, NOW_S + 29, arrived_s=NOW_S) is None
    assert table.bind("back", 460, NOW_S + 30, arrived_s=NOW_S) is not None
    assert paused(table) == {"soon"}
    # And at once, where nothing runs that would end.
    for name in ("runs", "back"):
        table.release(name)
    idle(table, "idle", 700, NOW_S + 30)
    assert table.bind("soon", 460, NOW_S + 31, arrived_s=NOW_S + 31) is not None
    assert paused(table) == {"idle"}


def test_nothing_is_paused_in_vain() -> None:
    """All idle histories would not be enough."""
    table = a_table(decoders=1, pausing=Pausing())
    start(table, "a", 800)
    idle(table, "b", 100)
    assert table.bind("c", 300, NOW_S) is None
    assert paused(table) == set()


def test_without_pausing_who_comes_waits_as_in_the_paper() -> None:
    table = a_table(decoders=1)
    idle(table, "a", 900)
    assert table.bind("b", 200, NOW_S) is None
    assert table.memory is None


def test_who_will_be_back_soon_moves_where_there_is_room() -> None:
    table = a_table(decoders=2, pausing=Pausing())
    for name in "abcd":
        idle(table, name, 400, NOW_S - 1)
    homes = {name: the(table, name).home for name in "abcd"}
    full = homes["a"]
    (other,) = (name for name in "bcd" if homes[name] == full)
    table.release(next(name for name in "bcd" if homes[name] != full))
    assert table.begin("a", NOW_S) is not None
    assert Turn.last(table, "a").advance(table, 700, (b"0" * 16,), NOW_S)
    relieve(table)
    assert paused(table) == {other}
    placement = bound(table, other, 450, NOW_S + 2)
    assert placement.decoder_id != full


def test_where_more_is_bound_than_fits_anywhere_whoever_is_idle_goes() -> None:
    """Else they would evict each other from their engine, turn by turn."""
    table = a_table(decoders=1, pausing=Pausing())
    idle(table, "short", 300, NOW_S - 1)
    idle(table, "long", 500, NOW_S - 1)
    turn = start(table, "grows", 200, NOW_S)
    assert turn.advance(table, 250, (b"0" * 16,), NOW_S)
    relieve(table)
    assert paused(table) == {"short"}
    # It does not take the others' room in turn, while there is work.
    assert table.begin("grows", NOW_S) is not None
    assert table.bind("short", 310, NOW_S + 1) is None
    assert paused(table) == {"short"}


def test_who_finds_a_place_elsewhere_goes_before_who_does_not() -> None:
    table = a_table(decoders=0, pausing=Pausing())
    table.add_decoder("d1", 2000)
    # What was idle for longer is cheaper, were there room for it.
    idle(table, "long", 1000, NOW_S - 6)
    idle(table, "short", 400, NOW_S - 1)
    turn = start(table, "grows", 600, NOW_S)
    assert turn.advance(table, 800, (b"0" * 16,), NOW_S)
    table.add_decoder("d2", 500)
    relieve(table)
    assert paused(table) == {"short"}


def test_of_a_decoder_that_stays_too_full_all_that_is_idle_goes() -> None:
    table = a_table(decoders=1, pausing=Pausing(mark=0.5))
    start(table, "a", 800)
    idle(table, "b", 100)
    relieve(table)
    assert paused(table) == {"b"}


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=7),
    idle_for=st.lists(st.sampled_from([300.0, 500.0, 900.0]), min_size=7, max_size=7),
    mark=st.sampled_from([0.3, 0.7, 1.0]),
)
def test_it_is_enough_and_none_too_many_and_the_cheapest_first(
    lengths: list[int], idle_for: list[float], mark: float
) -> None:
    policy = Pausing(mark)
    table = a_table(decoders=1, capacity_tokens=4000, pausing=policy)
    known = {}
    for number, (length, since) in enumerate(zip(lengths, idle_for, strict=False)):
        name, tokens = f"{number}", 10 * length + 10
        idle(table, name, tokens, NOW_S - since)
        known[name] = Idle(name, tokens, tokens, tokens, since)
    for name, one in known.items():
        others = sum(2 * other.idle_s >= one.idle_s for other in known.values()) - 1
        known[name] = replace(one, still_idle=others)
    held, most = sum(one.held_tokens for one in known.values()), int(4000 * mark)
    for _ in range(2):
        relieve(table)
    gone = paused(table)
    left = held - sum(known[name].held_tokens for name in gone)
    assert left <= most
    assert memory_of(table).pauses == ({"mark": len(gone)} if gone else {})
    # All pauses were necessary.
    assert all(left + known[name].held_tokens > most for name in gone)
    # No cheaper history was spared for one that is dearer and frees no more.
    for name, other in itertools.product(gone, known.keys() - gone):
        cheaper = policy.cost(known[other]) < policy.cost(known[name])
        assert not cheaper or known[other].held_tokens < known[name].held_tokens


def test_of_several_decoders_the_one_where_it_costs_least() -> None:
    table = a_table(pausing=Pausing())
    idle(table, "fresh", 900, NOW_S - 1)
    idle(table, "old", 900, NOW_S - 900)
    bound(table, "new", 500)
    assert paused(table) == {"old"}


def test_who_comes_back_finds_what_its_engine_has_kept() -> None:
    table = a_table(decoders=2, pausing=Pausing())
    for name in ("a", "b"):
        idle(table, name, 400)
    home = the(table, "a").home
    assert home is not None
    table.decoders[home].held_tokens += 1000
    relieve(table)
    table.decoders[home].held_tokens -= 1000
    assert paused(table) == {"a"}
    placement = bound(table, "a", 450)
    # No prefiller: fifty tokens are new.
    assert placement == Placement(home, None)
    assert memory_of(table).restores == {"kept": 1}
    assert the(table, "a").moves == 0
    assert not memory_of(table)._paused_on


def test_what_was_used_since_has_taken_the_place_of_what_is_idle() -> None:
    """A history that ends leaves newer KV behind, so the engine evicts the older."""
    table = a_table(decoders=1, pausing=Pausing())
    idle(table, "a", 400, NOW_S - 5)
    for number in range(4):
        start(table, f"short-{number}", 300, NOW_S)
        table.release(f"short-{number}")
    # It would be back soon, and find nothing.
    assert table.bind("new", 700, NOW_S) is not None
    assert paused(table) == {"a"}
    table.release("new")
    placement = bound(table, "a", 450)
    assert placement.prefiller_id == "p1"
    assert memory_of(table).restores == {"again": 1}


def test_a_move_is_counted_and_both_decoders_forget_at_the_end() -> None:
    table = a_table(pausing=Pausing())
    idle(table, "a", 600)
    home = the(table, "a").home
    start(table, "b", 900, NOW_S)
    start(table, "c", 900, NOW_S)
    assert paused(table) == {"a"}
    table.release("b" if Turn.last(table, "c").decoder_id == home else "c")
    placement = bound(table, "a", 650)
    assert placement.decoder_id != home
    assert the(table, "a").moves == 1
    assert memory_of(table).restores == {"moved": 1}
    memory_of(table).take_forgotten()
    incarnation = the(table, "a").incarnation
    table.release("a")
    # The one that it is on hears of it as ever.
    (one,) = memory_of(table).take_forgotten()
    assert (one.decoder_id, one.history_id, one.incarnation) == (home, "a", incarnation)
    assert memory_of(table).take_forgotten() == []


def test_what_several_begin_with_comes_free_with_the_last_of_them() -> None:
    """Fifty sub-agents share 800 tokens: their own parts would not be enough."""
    table = a_table(decoders=1, capacity_tokens=1400, pausing=Pausing())
    for number in range(5):
        alike(table, f"agent\t\t{number}", 800, TurnStats(800, 20, 800, 0))
    assert table.decoders["d1"].held_tokens == 900
    assert table.bind("new", 1300, NOW_S) is not None
    assert len(paused(table)) == 5


def test_a_lost_decoder_leaves_nothing_to_come_back_to() -> None:
    table = a_table(pausing=Pausing())
    idle(table, "a", 600)
    home = the(table, "a").home
    assert home is not None
    start(table, "b", 900, NOW_S)
    start(table, "c", 900, NOW_S)
    table.remove_engine(home)
    table.add_decoder(home, 1000)
    placement = bound(table, "a", 650)
    assert placement.prefiller_id == "p1"


@pytest.mark.parametrize("seed", range(5))
def test_the_account_is_right_whoever_is_paused(seed: int) -> None:
    """Decoders hold no more than they have room for, and nothing when all have ended."""
    rng = random.Random(seed)
    table = a_table(decoders=3, capacity_tokens=5000, pausing=Pausing(0.9))
    now_s, running = 0.0, {}
    for step in range(2000):
        now_s += rng.random()
        name = f"c{rng.randrange(60)}"
        if name in running:
            turn, tokens = running.pop(name)
            if rng.random() < 0.9:
                assert turn.advance(table, tokens, (name.encode().ljust(16, b"-"),), now_s)
            else:
                turn.abandon(table, now_s=now_s)
        else:
            one = table.get(name)
            tokens = rng.randrange(20, 900)
            if one is not None and one.last_turn is not None:
                tokens = min(4000, one.last_turn.prompt_tokens + rng.randrange(10, 300))
            if table.begin(name, now_s) or table.bind(name, tokens, now_s):
                running[name] = (Turn.last(table, name), tokens)
        if step % 50 == 0:
            for decoder in table.decoders.values():
                memory_of(table).relieve(decoder, table.decoders.values(), now_s)
        for decoder in table.decoders.values():
            held = [one for one in table.live() if one.home == decoder.id]
            assert decoder.held_tokens == sum(one.held_tokens for one in held)
            assert decoder.conversations == len(held)
        assert len(memory_of(table)._paused_on) <= len(paused(table))
        at_work = [
            one
            for one in table.live()
            if one.running or (one.home and now_s - one.last_used_s < RECENT_S)
        ]
        assert table.active(now_s) == len(at_work)
    assert memory_of(table).pauses["room"] > 5
    assert memory_of(table).pauses["mark"] > 5
    for one in table.live():
        table.release(one.id)
    assert table.active(now_s) == 0
    assert all(one.held_tokens == 0 for one in table.decoders.values())
    assert not memory_of(table)._paused_on


def test_a_compacted_conversation_does_not_wait_for_itself() -> None:
    table = a_table(decoders=1, pausing=Pausing())
    idle(table, "a", 900, NOW_S - 1)
    assert table.bind("a\t\t1", 300, NOW_S) is not None
    assert paused(table) == {"a"}


def test_the_beginning_that_a_prompt_shares_is_not_taken_for_it() -> None:
    table = a_table(decoders=1, pausing=Pausing())
    parent = (b"0" * 16,)
    bound(table, "parent", 500, LONG_AGO_S, opening=Opening(chain("x")))
    assert Turn.last(table, "parent").advance(table, 480, parent, LONG_AGO_S)
    idle(table, "other", 100)
    start(table, "runs", 390, NOW_S)
    branch = Opening(chain("x", parent))
    bound(table, "branch", 600, NOW_S, opening=branch)
    assert paused(table) == {"other"}


def test_of_those_that_share_none_goes_needlessly() -> None:
    table = a_table(decoders=1, capacity_tokens=3000, pausing=Pausing())
    for name, own in (("a", 100), ("b", 100), ("c", 100), ("big", 1900)):
        alike(table, name, 100, TurnStats(90 + own, 10, 100, 0))
    assert table.decoders["d1"].held_tokens == 2300
    assert table.bind("new", 2400, NOW_S) is not None
    assert paused(table) == {"big"}


def test_what_is_shared_is_found_again_too() -> None:
    """Three agents with 800 tokens in common and 20 of their own; the engine still has all."""
    table = a_table(decoders=1, pausing=Pausing())
    for number in range(3):
        alike(table, f"{number}", 800, TurnStats(810, 10, 800, 0))
    table.decoders["d1"].held_tokens += 1000
    relieve(table)
    table.decoders["d1"].held_tokens -= 1000
    assert paused(table) == {"0", "1", "2"}
    placement = bound(table, "1", 830)
    assert placement.prefiller_id is None


def test_who_begins_as_others_do_is_not_taken_for_lost_to_its_engine() -> None:
    """What it shares counts as there, beside the little of its own."""
    table = a_table(decoders=1, pausing=Pausing())
    memory_of(table).set_host_tokens(10_000)
    for name in ("first", "a", "b"):
        bound(table, name, 800, NOW_S - 1, opening=Opening(chain("x")))
        ends(table, name, TurnStats(800, 20, 800, 0), NOW_S - 1)
    table.release("first")
    start(table, "runs", 100, NOW_S)
    assert table.bind("new", 200, NOW_S) is None
    assert paused(table) == set()
    # Copies of both in host memory have their beginning once.
    for name in ("a", "b"):
        memory_of(table).parked(the(table, name), 820)
    assert memory_of(table).parked_tokens == 2 * 20


def test_one_whose_turn_came_to_nothing_is_forgotten_at_its_end() -> None:
    table = a_table(decoders=1, pausing=Pausing())
    idle(table, "a", 600)
    start(table, "b", 700, NOW_S)
    table.release("b")
    assert table.bind("a", 650, NOW_S) is not None
    Turn.last(table, "a").abandon(table, now_s=NOW_S)
    memory_of(table).take_forgotten()
    table.release("a")
    assert [one.history_id for one in memory_of(table).take_forgotten()] == ["a"]


def test_nothing_is_kept_of_those_that_ended() -> None:
    table = a_table(pausing=Pausing())
    for number in range(100):
        idle(table, f"{number}", 300)
        table.bind(f"next-{number}", 500, NOW_S)
        table.release(f"next-{number}")
    memory = memory_of(table)
    assert sum(map(len, memory._paused_on)) > 50
    for number in range(100):
        table.release(f"{number}")
    assert not any(memory._emptied.values())
    assert (memory._paused_on, memory._left) == ({}, {})
    # What engines may have yet of those that ended is no more than fits.
    assert all(cache.tokens <= 1000 for cache in memory._caches.values())


def test_a_decoder_that_returns_with_an_older_record_is_to_forget_it() -> None:
    table = a_table(pausing=Pausing())
    idle(table, "a", 400)
    home = str(the(table, "a").home)
    old = copy.copy(the(table, "a"))
    start(table, "b", 900, NOW_S)
    start(table, "c", 900, NOW_S)
    table.release("b" if Turn.last(table, "c").decoder_id == home else "c")
    assert table.bind("a", 700, NOW_S) is not None
    away = the(table, "a").home
    assert away != home
    assert Turn.last(table, "a").advance(table, 700, (b"2" * 16,), NOW_S)
    memory_of(table).pause(the(table, "a"), "room")
    table.remove_engine(home)
    assert table.add_decoder(home, 1000, [old]) == ["a"]
    assert the(table, "a").home is None
    assert memory_of(table).paused_on("a") == away


def test_a_new_table_takes_the_newest_record_though_its_turn_runs() -> None:
    policy = ConversationPlacement()
    table = ConversationTable(policy, 100.0, first_id=1000, pausing=Pausing())
    old = History("a", 7, 0.0, 0.0, held_tokens=300, turns=2, finished=5)
    new = History("a", 7, 1.0, 1.0, running=(9,))
    assert table.add_decoder("d1", 1000, [old]) == []
    assert table.add_decoder("d2", 1000, [new]) == []
    assert the(table, "a").home == "d2"
    assert memory_of(table).left_on("d1") == {"a"}


def test_the_time_in_line_is_no_idle_time() -> None:
    policy = Pausing()
    table = a_table(decoders=1, pausing=policy)
    for number in range(40):
        idle(table, "a", 600, number * 1000.0)
        memory_of(table).pause(the(table, "a"), "room")
        came_s = number * 1000.0 + 3
        assert table.bind("a", 600, came_s + 100, arrived_s=came_s) is not None
        table.release("a")
    assert policy.gaps.chance(0.0, 5.0) > 0.8


@given(
    parents=st.lists(st.integers(-1, 3), max_size=5),
    bases=st.lists(st.integers(-1, 4), min_size=1, max_size=8),
    data=st.data(),
)
def test_what_comes_free_is_what_nobody_who_stays_begins_with(
    parents: list[int], bases: list[int], data: st.DataObject
) -> None:
    prefixes: list[Prefix] = []
    for number, parent in enumerate(parents):
        base = prefixes[parent] if 0 <= parent < number else None
        prefixes.append(Prefix(100 * (number + 1), 0, base))
    histories = []
    for number, at in enumerate(bases):
        histories.append(History(f"{number}", 1, 0.0, 0.0, held_tokens=1000 + number))
        histories[-1].base = prefixes[at] if 0 <= at < len(prefixes) else None

    def begun_with(of: list[History]) -> list[Prefix]:
        """The beginnings of these, and what those begin with, each once."""
        found: dict[int, Prefix] = {}
        for one in of:
            node = one.base
            while node is not None:
                found[id(node)] = node
                node = node.base
        return list(found.values())

    def reached(of: list[History]) -> int:
        own = sum(one.tokens - (one.base.tokens if one.base else 0) for one in begun_with(of))
        return own + sum(one.held_tokens - one.shared_tokens for one in of)

    for user in (*histories, *begun_with(histories)):
        if user.base is not None:
            user.base.users += 1
    going, gone = Going(), list[History]()
    for change, note in ((going.add, gone.append), (going.remove, gone.remove)):
        for one in data.draw(st.permutations(histories)):
            change(one)
            note(one)
            stay = [other for other in histories if other not in gone]
            assert going.tokens == reached(histories) - reached(stay)


def test_a_decoder_that_asks_is_told_once_how_long_to_hold_who_has_come_to_rest() -> None:
    policy = Pausing()
    table = a_table(decoders=1, pausing=policy, capacity_tokens=10_000)
    memory = memory_of(table)
    (decoder_id,) = table.decoders
    idle(table, "before it asked", 100, NOW_S)
    assert memory.take_holds(decoder_id, NOW_S) == []
    for _ in range(200):
        policy.gaps.add(5.0)
    for name in ("rests", "runs", "is told by its client", "is gone"):
        idle(table, name, 100, NOW_S)
    start(table, "runs", 150, NOW_S)
    told = table.get("is told by its client")
    assert told is not None
    told.hints = Hints(expected_resume_s=3.0)
    table.release("is gone")
    (hold,) = memory.take_holds(decoder_id, NOW_S + 1)
    assert (hold.history_id, hold.for_s) == ("rests", 7.0)
    assert hold.incarnation == the(table, "rests").incarnation
    assert memory.take_holds(decoder_id, NOW_S + 2) == []
