"""What is stored beside the steps that follow: nobody waits, and nothing is written over."""

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from conserve.late_kv import HANGS_S, LOST_S
from conserve.wire import OVERDUE
from deployments.engine.lmcache_connector import ResilientMPConnector
from deployments.engine.stores import StoresReport, groups_that_give_up
from tests.unit.deployments.engine.stepping import words
from tests.unit.deployments.engine.storing import CHUNK_TOKENS, Storing
from tests.unit.deployments.waiting import eventually


@pytest.mark.parametrize("two_in_flight", [False, True])
@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_random_turns_are_stored_as_they_were_computed(
    seed: int, window: bool, two_in_flight: bool
) -> None:
    """With preemptions, prompts that begin alike, clients that leave, and hardly any room."""
    chance = random.Random(seed)
    engine = Storing(blocks=52, takes_steps=4, window=window, two_in_flight=two_in_flight)
    shared = words(chance, 200)
    asked: dict[str, int] = {}
    left = set()
    for number in range(60):
        name = f"r{number}"
        prompt = shared[: chance.choice((0, 0, 100, 200))]
        prompt += words(chance, chance.randrange(20, 600))
        engine.store(name, prompt, max_tokens=chance.choice((1, 1, 40, 250)))
        asked[name] = len(prompt)
        for _ in range(chance.randrange(5)):
            engine.step()
        if engine.live and chance.random() < 0.15:
            gone = chance.choice(sorted(engine.live))
            engine.abort(gone)
            left.add(gone)
    engine.settle()
    assert not engine.wrong
    assert engine.preempted
    assert not engine.spoiled
    assert all(copy.done for copy in engine.copies)
    long = {one for one, tokens in asked.items() if tokens >= CHUNK_TOKENS}
    assert {copy.request_id for copy in engine.copies} >= long - left
    eventually(lambda: {one for one, _ in engine.told} >= asked.keys() - left)
    assert len(engine.told) == len({one for one, _ in engine.told})
    assert all(done for _, done in engine.told)
    assert not engine.front._to_tell
    assert not engine.front._pins._pinned
    engine.require_no_leak()


@pytest.mark.parametrize("two_in_flight", [False, True])
@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_random_prompts_whose_loads_fail_are_stored_as_they_were_computed(
    seed: int, window: bool, two_in_flight: bool
) -> None:
    engine, asked = _with_failing_loads(seed, window, two_in_flight)
    assert not engine.wrong
    assert not engine.spoiled
    assert engine.preempted
    failed = [one for one in engine.loaded if one in engine.fail]
    assert failed
    # It is not tried again.
    assert len(failed) == len(set(failed))
    stored = {
        (copy.request_id, position // CHUNK_TOKENS)
        for copy in engine.copies
        for _, _, (_, position, _) in copy.reads
    }
    # All of them, up to their last chunks, also where an answer has one token.
    assert stored >= {(one, asked[one] // CHUNK_TOKENS - 1) for one in failed}
    assert not engine.front._failed
    engine.require_no_leak()


def _with_failing_loads(
    seed: int,
    window: bool,
    two_in_flight: bool,
    change: Callable[[Storing], None] = lambda engine: None,
) -> tuple[Storing, dict[str, int]]:
    """Prompts behind a beginning that the engine has, and where a step ends within a block."""
    chance = random.Random(seed)
    engine = Storing(
        blocks=90 if window else 60, takes_steps=1, window=window, two_in_flight=two_in_flight
    )
    change(engine)
    shared = words(chance, 320)
    asked: dict[str, int] = {}
    for number in range(80):
        name = f"r{number}"
        own = words(chance, chance.randrange(20, 900))
        prompt = shared[: chance.choice((0, 100, 320))] + own
        asked[name] = len(prompt)
        chunks = min(len(prompt), 640) // CHUNK_TOKENS
        engine.found_tokens[name] = chance.randrange(chunks + 1) * CHUNK_TOKENS
        if chance.random() < 0.6:
            engine.fail.add(name)
        engine.store(name, prompt, max_tokens=chance.choice((1, 150)))
        for _ in range(chance.randrange(5)):
            engine.step()
    engine.settle()
    return engine, asked


def test_a_load_that_is_never_answered_is_told_of_and_computed_once_it_fails() -> None:
    """After the time in which it is computed, and a grace; its blocks are not free before."""
    engine = Storing(takes_steps=10**6, found_tokens={"a": 320, "b": 320}, fail={"a", "b"})
    now_s = [1000.0]
    engine.front._loads.clock = lambda: now_s[0]
    engine.front._meter.token_s = 0.1

    def told(after_s: int, step_s: float = 1.0) -> Any:
        found = None
        for _ in range(after_s):
            now_s[0] += step_s
            stats = engine.front.get_kv_connector_stats()
            found = found or (stats.data.get(OVERDUE) if stats else None)
        return found

    for name in ("a", "b"):
        engine.store(name, words(random.Random(name), 400), max_tokens=1)
        engine.step()
    assert set(engine.loads) == {"a", "b"}
    engine.takes_steps = 1
    # While the engine stands still it has sent no load.
    assert told(1, step_s=600.0) is None
    assert told(58) is None
    engine.loads["b"] = engine.loads["b"][0], 0
    engine.step()
    for _ in range(4):
        assert told(20) is None
        engine.front._loads.begin("other", 0.0)
        engine.front._loads.end({"other"})
    assert told(13) == [LOST_S + 32]
    assert told(1) is None
    assert told(29) == [HANGS_S]
    engine.loads["a"] = engine.loads["a"][0], 0
    engine.settle()
    assert not engine.front._loads._open
    engine.require_no_leak()
    engine.front._loads.begin("slow to compute", 1e9)
    assert told(151) == [LOST_S + HANGS_S]


class Forgetful(set[str]):
    """Loads that have failed, unknown to the scheduler's half."""

    def __ior__(self, failed: Any) -> "Forgetful":  # type: ignore[override,misc]
        return self


def test_failures_of_lmcaches_blocks_give_wrong_answers() -> None:
    """As LMCache reports them for one group: running requests share the blocks."""

    def change(engine: Storing) -> None:
        engine.back._report_request_errors = False

    engine, _ = _with_failing_loads(0, False, True, change)
    assert engine.wrong


def test_lmcache_alone_stores_what_others_have_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a load that failed it stores late, when a window's blocks are others'."""
    monkeypatch.setattr(ResilientMPConnector, "_correct_counts", lambda self, output: None)

    def change(engine: Storing) -> None:
        engine.front._failed = Forgetful()

    engine, _ = _with_failing_loads(0, True, True, change)
    assert engine.spoiled


def test_lmcache_alone_loads_again_and_again() -> None:
    """If the load of a preempted request fails, and the server goes on finding its KV."""

    def change(engine: Storing) -> None:
        engine.front._failed = Forgetful()

    with pytest.raises(AssertionError, match="never end"):
        _with_failing_loads(0, True, False, change)


# --- blocks that a request gives up before it ends ------------------------------------------------


def test_groups_that_give_up_blocks_are_those_without_full_attention() -> None:
    shape = {"block_size": 32, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    full, window = FullAttentionSpec(**shape), SlidingWindowSpec(**shape, sliding_window=64)
    specs = [
        full,
        window,
        MLAAttentionSpec(**shape),
        ChunkedLocalAttentionSpec(**shape, attention_chunk_size=64),
        MambaSpec(block_size=32, shapes=((1,),), dtypes=(torch.float32,)),
        UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"a": full, "b": full}),
        UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"a": window, "b": window}),
    ]
    config = SimpleNamespace(kv_cache_groups=[KVCacheGroupSpec(["layer"], one) for one in specs])
    assert groups_that_give_up(config) == (1, 3, 4, 6)
    assert groups_that_give_up(None) == ()


def test_what_one_worker_has_not_stored_stays_pinned() -> None:
    assert StoresReport(4).aggregate(StoresReport(2)) == StoresReport(2)


def test_an_engine_without_other_work_goes_on_until_its_blocks_are_free() -> None:
    """Else they would stay pinned until another request comes."""
    engine = Storing(blocks=52, takes_steps=8, window=True)
    engine.store("r", words(random.Random(0), 300), max_tokens=1)
    engine.drain()
    steps = 0
    while engine.scheduler.has_requests():
        engine.step()
        steps += 1
        assert steps < 100
    assert all(copy.done for copy in engine.copies)
    engine.require_no_leak()
