"""A real engine computes long prompts in its lane; nothing else changes."""

import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from tests import machines
from tests.unit.conserve_inside.lane.engine import BLOCK_TOKENS, Engine, words

_BUDGET_TOKENS = 96


@pytest.fixture(scope="module")
def only_engine() -> Iterator[Engine]:
    """An engine is a process's: vLLM has one group of KV connectors in it."""
    machines.require_kernels()
    # Nor does an engine's own process compile: see `conserve.engines`.
    with torch.compiler.set_stance("force_eager"):
        engine = Engine()
        yield engine
        engine.drain()
        engine.core.shutdown()
    assert not engine_thread_lives()


@pytest.fixture
def engine(only_engine: Engine) -> Engine:
    """It, with nothing in it."""
    only_engine.begin(lane=True)
    return only_engine


def engine_thread_lives() -> bool:
    """Whether there is a thread of a lane's."""
    return any(thread.name == "prefill-lane" for thread in threading.enumerate())


def _decode(engine: Engine, tokens: int = 80, calls: int = 2) -> None:
    """Have some decode."""
    for number in range(calls):
        engine.add(f"decode{number}", words(number, 40), tokens)
    for _ in range(4):
        engine.step()


def _finish_steps(engine: Engine, name: str, most: int = 400) -> int:
    """Steps until a turn has its first token."""
    for steps in range(most):
        if engine.answers.get(name):
            return steps
        engine.step()
    raise AssertionError(f"{name} never begins")


def test_a_long_prompt_beside_decodes_goes_to_the_lane(engine: Engine) -> None:
    done, computed = engine.policy.done, engine.policy.computed_tokens
    _decode(engine)
    engine.add("short", words(3, 60), 4)
    engine.add("long", words(4, 500), 4)
    engine.step()
    assert engine.lane.observed()["lane_running"] == 1
    assert 0 < engine.lane.observed()["lane_tokens"] <= 499
    engine.drain()
    assert engine.policy.done == done + 1
    assert engine.policy.computed_tokens == computed + 499
    # It is computed here, and was in no cache.
    assert engine.cached == {"decode0": 0, "decode1": 0, "short": 0, "long": 0}
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


def test_decodes_go_on_while_the_lane_computes(engine: Engine) -> None:
    _decode(engine)
    had = len(engine.answers["decode0"])
    engine.add("long", words(4, 900), 4)
    steps = _finish_steps(engine, "long")
    # In chunks of the budget, one a step, and a token for each who decodes in each of these.
    assert steps >= 900 // _BUDGET_TOKENS
    assert len(engine.answers["decode0"]) >= had + 900 // _BUDGET_TOKENS
    engine.drain()


def test_alone_nothing_goes_to_the_lane(engine: Engine) -> None:
    done = engine.policy.done
    engine.add("long", words(4, 900), 4)
    engine.drain()
    assert engine.policy.done == done


def test_what_the_cache_has_is_not_computed_again(engine: Engine) -> None:
    computed = engine.policy.computed_tokens
    engine.add("first", words(5, 640), 4, key="history")
    engine.drain()
    _decode(engine)
    engine.add("second", [*words(5, 640), *words(6, 320)], 4, key="history")
    engine.drain()
    assert engine.policy.computed_tokens == computed + 319
    assert engine.cached["second"] == 640


def test_one_at_a_time_and_others_wait_or_run_inline(engine: Engine) -> None:
    done = engine.policy.done
    _decode(engine)
    for number in range(3):
        engine.add(f"long{number}", words(10 + number, 400), 4)
    engine.step()
    seen = engine.lane.observed()
    assert (seen["lane_running"], seen["lane_waiting"]) == (1, 2)
    engine.drain()
    assert engine.policy.done == done + 3
    engine.require_no_leak()


def test_its_conversation_is_charged(engine: Engine) -> None:
    now_s = engine.scheduler.clock()
    _decode(engine)
    before = engine.scheduler.queue.service_tokens("reader", now_s)
    engine.add("long", words(4, 900), 1, key="reader")
    engine.drain()
    after = engine.scheduler.queue.service_tokens("reader", engine.scheduler.clock())
    # It decays.
    assert 0.7 * 900 < after - before <= 902


def test_who_leaves_while_the_lane_computes_leaves_nothing(engine: Engine) -> None:
    failed, done = engine.policy.failed, engine.policy.done
    _decode(engine)
    engine.add("long", words(4, 1_200), 4)
    engine.add("next", words(7, 400), 4)
    for _ in range(3):
        engine.step()
    assert engine.policy.current is not None
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


def _play(engine: Engine, seed: int, lane: bool) -> tuple[dict[str, list[int]], int]:
    """Random turns; answers of those whose clients stayed, and how many were preempted.

    What comes when, and who leaves, is by steps: with and without a lane the same.
    """
    chance = random.Random(seed)
    engine.begin(lane)
    history: dict[str, list[int]] = {}
    left: set[str] = set()
    plan: dict[str, list[tuple[list[int], int, bool]]] = {}
    for number in range(7):
        key = f"c{number}"
        plan[key] = [
            (
                words(chance.randrange(10**6), chance.choice((20, 90, 300, 600))),
                chance.randrange(2, 90),
                chance.random() < 0.15,
            )
            for _ in range(3)
        ]
        history[key] = []
    waits = dict.fromkeys(plan, 0)
    leaves_at: dict[str, int] = {}
    preempted = sum(engine.scheduler.counts.preempted)
    for step in range(6_000):
        for key, turn in list(waits.items()):
            prompt, tokens, leaves = plan[key][turn]
            history[key] = [*history[key], *prompt]
            name = f"{key}.{turn}"
            engine.add(name, history[key], tokens, key)
            if leaves:
                leaves_at[name] = step + 2 + turn
            del waits[key]
        for name in [name for name, at in leaves_at.items() if at <= step]:
            del leaves_at[name]
            if name not in engine.ended:
                engine.abort(name)
            left.add(name)
            # Its conversation ends with it, in every run.
        for name in engine.step():
            key, turn_text = name.split(".")
            if name in left or name in leaves_at:
                continue
            history[key] = [*history[key], *engine.answers[name]]
            if int(turn_text) + 1 < 3 and len(history[key]) < 1_200:
                waits[key] = int(turn_text) + 1
        if not waits and not engine.scheduler.has_requests():
            break
    engine.drain()
    stayed = {
        name: answer
        for name, answer in engine.answers.items()
        if not plan[name.split(".")[0]][int(name.split(".")[1])][2]
    }
    return stayed, sum(engine.scheduler.counts.preempted) - preempted


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
