"""A real engine computes long prompts in its lane; nothing else changes."""

import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from vllm import SamplingParams

from tests.unit.conserve_inside.lane.engine import BLOCK_TOKENS, Engine, running, words
from tests.unit.conserve_inside.lane.playing import Turn, play

_BUDGET_TOKENS = 96


@pytest.fixture(scope="module")
def only_engine() -> Iterator[Engine]:
    with running() as engine:
        yield engine


@pytest.fixture
def engine(only_engine: Engine) -> Engine:
    """It, with nothing in it."""
    only_engine.begin(lane=True)
    return only_engine


def _decode(engine: Engine, tokens: int = 80, calls: int = 2) -> None:
    """Have some decode."""
    for number in range(calls):
        engine.add(f"decode{number}", words(number, 40), tokens)
    for _ in range(4):
        engine.step()


def test_a_long_prompt_beside_decodes_goes_to_the_lane(engine: Engine) -> None:
    policy, queue, clock = engine.policy, engine.scheduler.queue, engine.scheduler.clock
    done, computed = policy.done, policy.computed_tokens
    _decode(engine)
    had = len(engine.answers["decode0"])
    served = queue.service_tokens("reader", clock())
    engine.add("short", words(3, 60), 4)
    engine.add("long", words(4, 900), 1, key="reader")
    engine.step()
    seen = engine.lane.observed()
    assert seen["lane_running"] == 1
    assert 0 < seen["lane_tokens"] <= 899
    steps = 0
    while "long" not in engine.ended:
        steps += 1
        engine.step()
    # In chunks of the budget, one a step, and a token for each that decodes in each of these.
    assert steps >= 900 // _BUDGET_TOKENS
    assert len(engine.answers["decode0"]) >= had + 900 // _BUDGET_TOKENS
    engine.drain()
    assert (policy.done, policy.computed_tokens) == (done + 1, computed + 899)
    # It is computed here, and was in no cache.
    assert engine.cached == {"decode0": 0, "decode1": 0, "short": 0, "long": 0}
    # Its conversation is charged, which decays.
    assert 0.7 * 900 < queue.service_tokens("reader", clock()) - served <= 902
    engine.require_no_leak()


def test_vllm_counts_no_hit_of_the_connectors(engine: Engine) -> None:
    _decode(engine)
    engine.add("long", words(4, 500), 4)
    engine.scheduler.make_stats()
    output = engine.scheduler.schedule()
    stats = engine.scheduler.connector_prefix_cache_stats
    assert stats.hits == 0
    assert stats.queries >= 500
    ran = engine.core.model_executor.execute_model(output)
    ran = ran if ran is not None else engine.core.model_executor.sample_tokens(None)
    engine.scheduler.update_from_output(output, ran)
    engine.drain()


def test_what_the_cache_has_is_not_computed_again(engine: Engine) -> None:
    computed = engine.policy.computed_tokens
    engine.add("first", words(5, 640), 4, key="history")
    engine.drain()
    # It was alone, so it was computed in steps.
    assert engine.policy.computed_tokens == computed
    _decode(engine)
    engine.add("second", [*words(5, 640), *words(6, 320)], 4, key="history")
    engine.drain()
    assert engine.policy.computed_tokens == computed + 319
    assert engine.cached["second"] == 640


def test_who_leaves_while_the_lane_computes_leaves_nothing(engine: Engine) -> None:
    failed, done = engine.policy.failed, engine.policy.done
    _decode(engine)
    engine.add("long", words(4, 1_200), 4)
    engine.add("next", words(7, 400), 4)
    for _ in range(3):
        engine.step()
    seen = engine.lane.observed()
    assert (seen["lane_running"], seen["lane_waiting"]) == (1, 1)
    engine.abort("long")
    engine.drain()
    assert "long" not in engine.ended
    assert "next" in engine.ended
    assert (engine.policy.done, engine.policy.failed) == (done + 1, failed)
    engine.require_no_leak()


def test_blocks_of_who_left_are_nobodys_until_the_chunk_is_over(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    forward = engine.thread._forward
    wait = forward.compute

    def slow(job: Any, start: int, end: int) -> Any:
        done = wait(job, start, end)

        def when_told() -> None:
            begun.set()
            assert go_on.wait(60)
            done()

        return when_told

    monkeypatch.setattr(forward, "compute", slow)
    _decode(engine)
    engine.add("long", words(4, 600), 4)
    while not begun.is_set():
        engine.step()
    free = engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    engine.abort("long")
    for _ in range(5):
        engine.step()
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() <= free
    go_on.set()
    engine.drain()
    engine.require_no_leak()


@pytest.mark.parametrize("after_chunks", [0, 2])
def test_what_the_lane_cannot_compute_is_computed_inline(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, after_chunks: int
) -> None:
    prompt = words(4, 500)
    engine.use_lane(False)
    engine.add("alone", prompt, 6)
    engine.drain()
    right = engine.answers["alone"]
    engine.begin(lane=True)
    engine.fails += 1
    chunks: list[int] = []
    forward = engine.thread._forward
    compute = forward.compute

    def breaks(job: Any, start: int, end: int) -> Any:
        chunks.append(start)
        if len(chunks) > after_chunks:
            raise RuntimeError("out of memory")
        return compute(job, start, end)

    monkeypatch.setattr(forward, "compute", breaks)
    _decode(engine)
    engine.add("long", prompt, 6)
    engine.drain()
    assert engine.answers["long"] == right
    assert engine.cached["long"] == 0
    engine.require_no_leak()


def _plan(seed: int) -> dict[str, list[Turn]]:
    chance = random.Random(seed)

    def turn(number: int) -> Turn:
        prompt = words(chance.randrange(10**6), chance.choice((20, 90, 300, 600)))
        tokens = chance.randrange(2, 90)
        return Turn(prompt, tokens, 2 + number if chance.random() < 0.15 else None)

    return {f"c{key}": [turn(number) for number in range(3)] for key in range(7)}


def _play(engine: Engine, seed: int, lane: bool) -> tuple[dict[str, list[int]], int]:
    """Random turns; answers of those whose clients stayed, and how many were preempted."""
    engine.begin(lane)
    before = sum(engine.scheduler.counts.preempted)
    return play(engine, _plan(seed)), sum(engine.scheduler.counts.preempted) - before


def test_random_turns_have_the_same_tokens_with_the_lane_and_without(engine: Engine) -> None:
    preempted = 0
    for seed in range(3):
        plain, _ = _play(engine, seed, lane=False)
        done = engine.policy.done
        beside, more = _play(engine, seed, lane=True)
        preempted += more
        assert engine.policy.done > done + 3, "the lane was hardly used"
        assert beside == plain
        engine.require_no_leak()
    assert preempted, "nobody was preempted"


def test_spoiled_kv_shows(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above would notice a lane that computes one position wrongly."""
    plain, _ = _play(engine, 0, lane=False)
    forward = engine.thread._forward
    compute = forward.compute

    def spoils(job: Any, start: int, end: int) -> Any:
        ids = [*job.tokens[:-1], (job.tokens[-1] + 1) % 900]
        return compute(replace(job, tokens=ids), start, end)

    monkeypatch.setattr(forward, "compute", spoils)
    beside, _ = _play(engine, 0, lane=True)
    assert beside != plain


def test_requests_that_it_is_not_for_are_computed_inline(engine: Engine) -> None:
    done = engine.policy.done
    _decode(engine)
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1, detokenize=False)
    engine.engine.add_request("scored", {"prompt_token_ids": words(4, 400)}, params)
    engine.drain()
    assert "scored" in engine.ended
    assert engine.policy.done == done
    assert BLOCK_TOKENS * 3 == _BUDGET_TOKENS
