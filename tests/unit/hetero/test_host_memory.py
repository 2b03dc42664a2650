"""What of the host's memory handoffs get, and what a token takes of it."""

from typing import Any

import pytest

from conserve.settings import load
from hetero.gpu_plan import GpuPlan
from hetero.host_memory import chunk_tokens, page_bytes, stored_bytes
from hetero.model_shape import ModelShape, shape_of
from tests.unit.hetero.planned import GIB, MIB, QWEN3, made, node
from tests.unit.hetero.shapes import DEEPSEEK_V3, QWEN3_8B, QWEN3_30B_A3B

DEEPSEEK = shape_of(DEEPSEEK_V3, 688_586_727_753)
EXPERTS = shape_of(QWEN3_30B_A3B, 61_000_000_000)
# 61 layers of a vector of 576 values, 16 bits each.
DEEPSEEK_TOKEN = 70_272


def planned(shape: ModelShape, arguments: dict[str, Any], machines: int = 1) -> GpuPlan:
    """For machines with eight GPUs of 141 GiB and enough memory of the host's."""
    return made(arguments, *[node(8, 141, 4096)] * machines, shape=shape)


ONE_ENGINE = {
    "placement": "collocated",
    "pausing": False,
    "decoders": 1,
    "engine.tensor_parallel_size": 8,
}


def test_latent_kv_is_stored_once_for_all_workers() -> None:
    """DeepSeek-V3 on eight GPUs asked for eight times as much."""
    found = planned(DEEPSEEK, ONE_ENGINE)
    assert found.size_gb == int(16 * 24_500 * DEEPSEEK_TOKEN / 0.72 / GIB) == 35
    assert found.kept_tokens == pytest.approx(0.72 * 35 * GIB / DEEPSEEK_TOKEN, rel=1e-3)
    parked = planned(
        DEEPSEEK, ONE_ENGINE | {"placement": "elastic", "pausing": True, "nodes": "one"}, 2
    )
    (_, decoder) = parked.engines
    assert decoder.kv_bytes is not None
    assert parked.size_gb == pytest.approx(1.5 * decoder.kv_bytes / GIB, abs=1)
    # Stages have layers of their own.
    stages = {"engine.tensor_parallel_size": 4, "engine.pipeline_parallel_size": 2}
    assert planned(DEEPSEEK, ONE_ENGINE | stages).size_gb == 35


def test_heads_of_kv_are_stored_by_each_worker() -> None:
    assert planned(QWEN3, ONE_ENGINE).size_gb == int(16 * 24_500 * 147_456 / 0.72 / GIB) == 74
    # With more workers than heads, several store the same.
    few = shape_of({**QWEN3_8B, "num_key_value_heads": 4}, 16_381_470_720)
    assert planned(few, ONE_ENGINE).size_gb == 74


@pytest.mark.parametrize("size_gb", [0.5, 2, 7.9, 8, 8.1, 64, 1000])
def test_pages_stay_few_as_memory_grows(size_gb: float) -> None:
    page = page_bytes(size_gb, shared=True)
    assert page & (page - 1) == 0
    assert size_gb * GIB / page <= 2**17
    # And are no larger than that takes, or chunks would waste memory.
    assert page == 64 * 1024 or size_gb * GIB / (page // 2) > 2**17
    assert page_bytes(size_gb, shared=False) == 4096


def test_a_chunk_takes_whole_pages_of_each_worker() -> None:
    # 256 tokens of a quarter of 96 KiB: 6 MiB, in pages of 4.
    assert stored_bytes(98_304 / 4, 4, 256, 4 * MIB) == 4 * 8 * MIB / 256 == 131_072
    assert stored_bytes(98_304 / 4, 4, 256, 2 * MIB) == 98_304


def test_servers_that_share_their_memory_keep_fewer_tokens_and_say_so() -> None:
    """Of this model a quarter of the memory is lost in pages of 4 MiB."""
    of_four = {"engine.tensor_parallel_size": 4, "decoders": 1, "lmcache.size_gb": 512}
    alone = planned(EXPERTS, of_four)
    assert alone.kept_tokens == int(0.72 * 512 * GIB / 98_304)
    for several in (planned(EXPERTS, of_four | {"nodes": "several"}), planned(EXPERTS, of_four, 2)):
        assert several.kept_tokens == int(0.72 * 512 * GIB / 131_072)


def test_the_size_allows_for_the_pages_that_come_of_it() -> None:
    of_four = {"engine.tensor_parallel_size": 4, "decoders": 1}
    alone = planned(EXPERTS, of_four)
    shared = planned(EXPERTS, of_four | {"nodes": "several"})
    # Chunks of 6 MiB for each worker.
    page = page_bytes(shared.size_gb, shared=True)
    assert page == 8 * MIB
    assert shared.size_gb == pytest.approx(alone.size_gb * 8 / 6, rel=0.01)
    assert shared.kept_tokens == pytest.approx(alone.kept_tokens, rel=0.01)


def test_pages_that_no_memory_is_enough_for_take_what_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chunks of 768 KiB: whatever the memory is, a page of it is larger."""
    monkeypatch.setattr("hetero.host_memory.chunk_tokens", lambda settings, gpu: 32)
    small = {"engine.tensor_parallel_size": 4, "decoders": 1}
    assert planned(EXPERTS, small | {"nodes": "several"}).size_gb == 2048


def test_chunks_are_whole_blocks() -> None:
    assert chunk_tokens(load({}), gpu=True) == 256
    assert chunk_tokens(load({}), gpu=False) == 128
    assert chunk_tokens(load({"engine.block_size": 1024}), gpu=True) == 1024
