"""A real engine computes long prompts in its lane; nothing else changes."""

import random
from collections.abc import Iterator
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


def test_requests_that_it_is_not_for_are_computed_inline(engine: Engine) -> None:
    done = engine.policy.done
    _decode(engine)
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1, detokenize=False)
    engine.engine.add_request("scored", {"prompt_token_ids": words(4, 400)}, params)
    engine.drain()
    assert "scored" in engine.ended
    assert engine.policy.done == done
    assert BLOCK_TOKENS * 3 == _BUDGET_TOKENS
