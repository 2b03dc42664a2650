"""The schedulers that are compared: what they must all do, and what each does differently."""

import random
from itertools import pairwise

import pytest

from benchmarks.simulate.inside.blocks import Blocks
from benchmarks.simulate.inside.call import Call
from benchmarks.simulate.inside.conversations import Parts
from benchmarks.simulate.inside.scheduler import Scheduler
from tests.unit.benchmarks.simulate.inside.playing import (
    PARTS,
    Played,
    count_blocks,
    random_turns,
    scheduler_of,
)


def test_two_calls_first_come_first_served_by_hand() -> None:
    played = Played(
        scheduler_of(None, blocks=20, step_tokens=8), {"a": [(10, 3, 0)], "b": [(4, 2, 0)]}
    )
    played.begin("a")
    played.begin("b")
    played.run()
    a, b = played.call("a"), played.call("b")
    # 8 of a; 2 of a and 4 of b; both decode; a decodes.
    assert a.first_token_s == b.first_token_s == pytest.approx(0.018 + 0.016)
    assert played.ends_s == {
        ("b", 0): pytest.approx(0.034 + 0.010),
        ("a", 0): pytest.approx(0.044 + 0.010),
    }
    assert a.gaps_s == pytest.approx([0.010, 0.010])


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("seed", range(3))
def test_every_turn_ends_with_its_tokens_and_every_block_is_free_in_the_end(
    name: str, seed: int
) -> None:
    turns = random_turns(seed)
    # A fifth of what all of them have.
    played = Played(scheduler_of(PARTS[name], blocks=100), turns)
    chance = random.Random(seed)
    for key in turns:
        played.begin(key, chance.uniform(0, 3))
    played.run()
    outputs = {
        (key, number): output
        for key, these in turns.items()
        for number, (_, output, _) in enumerate(these)
    }
    assert played.ends_s.keys() == outputs.keys()
    for key, these in turns.items():
        for number in range(len(these)):
            call = played.call(key, number)
            assert call.made_tokens == outputs[key, number] == len(call.gaps_s) + 1
            assert call.computed_tokens == call.prompt_tokens + call.made_tokens - 1
    scheduler = played.scheduler
    assert not scheduler.running
    assert not scheduler.waiting
    for key in list(scheduler.blocks.kept):
        scheduler.blocks.unkeep(key)
    assert scheduler.blocks.free == scheduler.blocks.total
    count_blocks(scheduler.blocks)


def test_there_is_pressure_in_what_was_just_played() -> None:
    played = Played(scheduler_of(None, blocks=100), random_turns(0))
    for number, key in enumerate(played.turns):
        played.begin(key, 0.1 * number)
    played.run()
    assert played.scheduler.preemptions > 0
    assert played.scheduler.blocks.evicted > 0


@pytest.mark.parametrize("name", PARTS)
def test_steps_that_are_taken_together_end_when_they_would_one_by_one(name: str) -> None:
    def ends_s(together: bool) -> dict[tuple[str, int], float]:
        # Room for all of them: where there is none, who is looked at when decides.
        played = Played(scheduler_of(PARTS[name], blocks=5_000), random_turns(1))
        if not together:
            played.scheduler.steps_alike = lambda step: 1
        for number, key in enumerate(played.turns):
            played.begin(key, 0.13 * number)
        return played.run().ends_s

    assert ends_s(together=True) == pytest.approx(ends_s(together=False), abs=0.06)


def test_whoever_asks_for_little_does_not_wait_for_who_asks_for_much() -> None:
    def light_s(parts: Parts | None) -> float:
        turns = {f"heavy{number}": [(300, 40, 0)] for number in range(4)} | {"light": [(8, 4, 0)]}
        # Room for one of the heavy ones, and the light one.
        played = Played(scheduler_of(parts, blocks=95), turns)
        for key in turns:
            played.begin(key, 0.02 if key == "light" else 0.0)
        return played.run().call("light").first_token_s

    assert light_s(Parts()) < light_s(None) / 2


def test_nobody_waits_for_ever_for_whoever_comes_after() -> None:
    def before_heavy(age_s: float) -> int:
        turns = {f"light{number}": [(60, 20, 0)] for number in range(100)}
        turns["heavy"] = [(300, 20, 0)]
        feedback = {"footprints": (0.01, 0.02, 0.03), "age_s": age_s}
        # Two at a time, which is half of what those who come would need.
        scheduler = scheduler_of(Parts(feedback=feedback), blocks=2_000, most_calls=2)
        played = Played(scheduler, turns)
        for number, key in enumerate(turns):
            played.begin(key, 0.3 if key == "heavy" else 0.1 * number)
        heavy = played.run().call("heavy")
        return sum(one.first_token_s < heavy.first_token_s for one in played.calls)

    assert before_heavy(1e9) == 100
    # Those of the four levels of half a second after it.
    assert before_heavy(0.5) <= 3 + 20


def test_what_a_turn_leaves_is_found_after_others_came_only_if_it_is_kept() -> None:
    def found_tokens(parts: Parts | None) -> int:
        turns = {"mine": [(100, 5, 1.5), (8, 2, 0)]} | {
            f"other{number}": [(100, 5, 0)] for number in range(6)
        }
        played = Played(scheduler_of(parts, blocks=60), turns, tells_ends=False)
        for number, key in enumerate(turns):
            played.begin(key, 0.2 * number)
        return played.run().call("mine", 1).found_tokens

    assert found_tokens(Parts()) == 104
    assert found_tokens(Parts(retention=False)) < 50
    assert found_tokens(None) < 50


def test_what_is_kept_gives_way_before_anybody_is_preempted() -> None:
    turns = {"away": [(100, 5, 1.9), (8, 2, 0)], "here": [(60, 90, 0)]}
    played = Played(scheduler_of(Parts(in_parts=False), blocks=50), turns)
    played.begin("away")
    played.begin("here", 0.2)
    played.run()
    assert played.scheduler.preemptions == 0
    assert played.scheduler.reclaimed_blocks > 0


def test_a_long_prompt_is_cut_for_those_who_decode() -> None:
    def longest_gap_s(parts: Parts | None) -> float:
        scheduler = scheduler_of(parts, blocks=1_000, step_tokens=1_024)
        played = Played(scheduler, {"chat": [(8, 100, 0)], "long": [(900, 2, 0)]})
        played.begin("chat")
        played.begin("long", 0.3)
        return max(played.run().call("chat").gaps_s)

    assert longest_gap_s(None) > 0.9
    # The least that a step has: a block and 128 tokens.
    assert longest_gap_s(Parts()) == pytest.approx(0.010 + 0.132, abs=0.005)


def test_a_prompt_without_room_begins_with_a_part() -> None:
    turns = {"first": [(150, 60, 0)], "second": [(100, 2, 0)]}
    began_s = {}
    for in_parts in (False, True):
        played = Played(scheduler_of(Parts(in_parts=in_parts), blocks=60), turns)
        played.begin("first")
        played.begin("second", 0.3)
        played.run()
        began_s[in_parts] = played.call("second").first_token_s
        assert played.scheduler.parts_begun == int(in_parts)
    assert began_s[True] < began_s[False]


def test_what_can_never_run_is_refused() -> None:
    scheduler = Scheduler(Blocks(10, 4))
    with pytest.raises(ValueError, match="41 tokens do not fit into 10 blocks"):
        scheduler.add(Call("a", 40, 1), 0.0)


def test_blocks_are_evicted_from_the_end_of_who_was_longest_unused() -> None:
    blocks = Blocks(10, 4)
    for key in ("early", "late"):
        blocks.hold(key, 4)
        blocks.let_go(key, 16)
    blocks.hold("new", 5)
    assert (blocks.found("early"), blocks.found("late"), blocks.evicted) == (1, 4, 3)
    with pytest.raises(ValueError, match="no room for 11 blocks"):
        blocks.hold("new", 11)


def test_kept_blocks_are_not_evicted_and_trimmed_from_their_end() -> None:
    blocks = Blocks(10, 4)
    blocks.hold("kept", 6)
    blocks.let_go("kept", 24)
    assert blocks.keep("kept") == 6
    assert not blocks.has_room("new", 5)
    assert blocks.unkeep("kept", 2) == 2
    blocks.hold("new", 5)
    assert blocks.found("kept") == 5
    count_blocks(blocks)


def test_gaps_add_up_to_the_time_between_the_first_token_and_the_last() -> None:
    played = Played(scheduler_of(Parts(), blocks=2_000), random_turns(2))
    for key in played.turns:
        played.begin(key)
    played.run()
    for call in played.calls:
        assert sum(call.gaps_s) == pytest.approx(call.last_token_s - call.first_token_s)
    assert all(before.came_s <= after.came_s for before, after in pairwise(played.calls))
