"""Engines on CPUs: what vLLM would refuse, and what the machine has no room for."""

from typing import Any

import pytest

from conserve.settings import SettingsError, load
from hetero.container import HostMemory
from hetero.cpu_plan import CpuPlan, plan
from hetero.model_shape import ModelShape, shape_of
from tests.unit.hetero.planned import GIB, QWEN3, QWEN3_BYTES
from tests.unit.hetero.shapes import QWEN3_8B


def made(
    arguments: dict[str, Any], gib: float = 512, free: float = 512, shape: ModelShape | None = QWEN3
) -> CpuPlan:
    memory = HostMemory(int(gib * GIB), int(free * GIB), gib < 512)
    return plan(load({"model": "m", **arguments}), shape, memory)[1]


def test_a_kv_space_that_holds_no_longest_sequence_is_refused() -> None:
    with pytest.raises(SettingsError) as refused:
        made({})
    # 1 GiB of 144 KiB a token.
    assert str(refused.value) == (
        "prefillers.env.VLLM_CPU_KVCACHE_SPACE: 1.0 GiB hold 7,280 tokens, and vLLM does not start "
        "with less than the longest sequence's 40,960, which take 5.6 GiB; set "
        "engine.max_model_len=7280, or more KV space"
    )
    assert made({"engine.max_model_len": 7280}).kv_gb == {"prefillers": 1, "decoders": 1}


def test_the_kv_space_is_what_engines_are_told() -> None:
    space = {"VLLM_CPU_KVCACHE_SPACE": "6"}
    given = {"prefillers.env": space, "decoders.env": space}
    assert made(given).kv_gb == {"prefillers": 6, "decoders": 6}
    assert made({"engine.kv_cache_memory_bytes": 7 * GIB}).kv_gb["decoders"] == 7
    with pytest.raises(SettingsError, match="whole number of GiB"):
        made({"decoders.env": {"VLLM_CPU_KVCACHE_SPACE": "6.5"}, "placement": "collocated"})


def test_engines_larger_than_the_machine_are_refused_with_the_sums() -> None:
    with pytest.raises(SettingsError) as refused:
        made({"engine.max_model_len": 4096}, gib=24, free=20)
    assert str(refused.value).startswith(
        "decoders: engines on CPUs do not fit: 1 prefillers x (15.3 weights + 1.0 KV space) + "
        "2 decoders x (15.3 weights + 1.0 KV space) + 2 for LMCache = 50.8 GiB, and 20.0 of "
        "the container's limit of 24.0 GiB are available"
    )
    small = {"engine.max_model_len": 4096, "placement": "collocated", "decoders": 1}
    assert made(small, gib=24, free=20).weights_bytes == QWEN3_BYTES


def test_lmcaches_memory_is_half_of_what_is_free_at_most() -> None:
    def size(free: float, **given: Any) -> float:
        return made(given, gib=8, free=free, shape=None).size_gb

    assert [size(8), size(4), size(3), size(1.2), size(0.1)] == [2, 2, 1.5, 0.5, 0.5]
    assert size(1, lmcache={"size_gb": 7}) == 7
    with pytest.raises(SettingsError, match=r"size_gb: 9 GiB, and 1\.0 of .* 8\.0 GiB"):
        size(1, lmcache={"size_gb": 9})


def test_a_model_that_is_not_known_is_no_obstacle() -> None:
    assert made({}, shape=None).weights_bytes is None


def test_what_is_counted_as_too_much_is_none() -> None:
    """Of layers with windows a long sequence takes less than is counted."""
    windowed = shape_of(QWEN3_8B | {"sliding_window": 4096}, QWEN3_BYTES)
    assert made({}, shape=windowed).kv_gb["decoders"] == 1
