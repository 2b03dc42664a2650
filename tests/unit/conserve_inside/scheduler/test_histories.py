"""What is kept between turns, and what becomes of it."""

import random
from typing import Any

import pytest

from conserve.wire import engine_told
from conserve_inside.scheduler.commands import Observe, Pin, Release, obey
from deployments.messages import SchedulerLoad
from tests.unit.conserve_inside.scheduler.stand_in import StandIn
from tests.unit.deployments.engine.stepping import BLOCK_TOKENS, words

CHANCE = random.Random(1)


def tokens(blocks: int) -> list[int]:
    return words(CHANCE, blocks * BLOCK_TOKENS)


def load(engine: StandIn) -> SchedulerLoad:
    found = obey(engine.scheduler, Observe())
    assert isinstance(found, SchedulerLoad)
    return found


def release(engine: StandIn, *keys: str) -> Any:
    return obey(engine.scheduler, Release(list(keys)))


def cached_blocks(engine: StandIn, *keys: str) -> list[int]:
    histories = engine.scheduler.histories
    return [histories.cached_tokens(key) // BLOCK_TOKENS for key in keys]


def held(hold_s: float, blocks: int = 41, kind: str = "sync") -> StandIn:
    kept = {"retention": {"hold_s": hold_s, "longest_s": 1e6}}
    return StandIn(kind=kind, blocks=blocks, policies=kept)


@pytest.mark.parametrize(("kind", "found"), [("sync", 10), ("async", 10), ("vllm", 0)])
def test_a_history_is_found_after_others_have_filled_the_cache(kind: str, found: int) -> None:
    """Not so with vLLM by itself."""
    engine = held(1_000.0, kind=kind)
    history = engine.turn("mine", tokens(10))
    for other in range(6):
        engine.turn(f"other{other}", tokens(12), last=True)
    engine.add("again", [*history, *tokens(1)], 4, "mine")
    engine.drain()
    assert engine.cached["again"] == found * BLOCK_TOKENS
    assert not engine.preempted
    engine.require_no_leak()


def test_without_retention_nothing_is_kept() -> None:
    for mechanisms, kept in ((("order", "retention"), 10), (("order",), 0)):
        engine = StandIn(blocks=41, policies={"mechanisms": mechanisms})
        engine.turn("mine", tokens(10))
        assert load(engine).pinned_blocks == kept


def test_what_is_kept_gives_way_before_anybody_is_preempted_and_the_least_worth_first() -> None:
    engine = held(1_000.0)
    engine.scheduler.queue.serve("served", 60_000, 0, 0.0)
    engine.turn("first", tokens(8))
    engine.turn("served", tokens(8))
    engine.turn("third", tokens(8))
    assert load(engine).free_blocks == 16
    engine.turn("needs", tokens(20), last=True)
    assert not engine.preempted
    # Just enough, of its end, and of nobody else.
    first, served, third = cached_blocks(engine, "first", "served", "third")
    assert (first, third) == (8, 8)
    assert 0 < served < 8
    engine.require_no_leak()


def test_nothing_is_given_up_for_what_would_not_fit_all_the_same() -> None:
    engine = held(1_000.0)
    engine.turn("mine", tokens(8))
    engine.add("decode", tokens(20), 200, "decode")
    engine.step()
    engine.scheduler.parts.current = "somebody"  # So that none may begin with a part.
    engine.scheduler.parts.new_step = lambda: None
    engine.add("large", tokens(24), 4, "large")
    engine.step()
    assert [one.request_id for one in engine.scheduler.running] == ["decode"]
    assert engine.scheduler.histories.reclaimed_blocks == 0


def test_a_turn_that_waits_keeps_its_history() -> None:
    engine = held(0.5)
    history = engine.turn("mine", tokens(8))
    engine.add("mine.2", [*history, *tokens(1)], 4, "mine")
    engine.now_s += 10.0
    engine.scheduler.histories.expire(engine.now_s)
    assert load(engine).pinned_blocks == 8
    # Cut while it waited, its history is kept no longer than before.
    engine.abort("mine.2")
    engine.now_s += 2.0
    engine.step()
    engine.turn("other", tokens(1), last=True)
    assert load(engine).pinned_blocks == 0
    engine.require_no_leak()


def test_released_to_the_front_it_is_evicted_before_what_is_older() -> None:
    engine = held(0.0)
    for key in ("old", "middle", "new"):
        engine.turn(key, tokens(8))
    assert release(engine, "new") == 8
    engine.turn("needs", tokens(22), last=True)
    assert cached_blocks(engine, "old", "middle") == [8, 8]
    # No longer known: nothing is said of it.
    known = engine.scheduler.histories.keys()
    assert "new" not in known


def test_what_others_have_too_stays() -> None:
    engine = held(1_000.0)
    system = tokens(5)
    engine.turn("one", [*system, *tokens(3)])
    engine.turn("two", [*system, *tokens(6)])
    assert release(engine, "one") == 3
    assert cached_blocks(engine, "two") == [11]
    engine.require_no_leak()


def test_a_history_with_a_turn_is_not_released() -> None:
    engine = held(1_000.0)
    history = engine.turn("mine", tokens(8))
    engine.add("mine.2", [*history, *tokens(1)], 50, "mine")
    assert release(engine, "mine") == 0
    engine.step()
    assert release(engine, "mine") == 0
    assert obey(engine.scheduler, Pin({"mine": 9.0})) == 0
    engine.drain()
    assert not engine.wrong


def test_a_turns_end_says_what_stays_of_its_history() -> None:
    engine = held(3.0)
    engine.now_s += 100.0
    engine.add("mine.1", tokens(8), 4, "mine")
    engine.add("nobodys", tokens(8), 4)
    engine.drain()
    told = engine_told(engine.said["mine.1"])
    assert told.kept_tokens == 8 * BLOCK_TOKENS
    assert told.kept_s is not None
    assert 0 < told.kept_s <= 3.0
    assert engine.said["nobodys"] is None


def test_of_long_ended_histories_no_more_is_known_than_four_times_the_engine_holds() -> None:
    engine = held(0.0)
    for number in range(60):
        engine.turn(f"one{number}", tokens(12))
    known = engine.scheduler.histories.keys()
    # Of 41 blocks.
    assert 12 * len(known) <= 4 * 41 < 12 * (len(known) + 1)
    assert "one59" in known
    assert "one0" not in known
    # Released, they count no longer.
    for key in known:
        release(engine, key)
    assert engine.scheduler.histories.keys() == []
    engine.require_no_leak()
