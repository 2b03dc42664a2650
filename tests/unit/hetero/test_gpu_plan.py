"""The plan as a whole: host memory for KV, and what an operator is told."""

from typing import Any

import pytest

from conserve.settings import SettingsError
from hetero.host_memory import chunk_tokens
from hetero.model_shape import shape_of
from tests.unit.hetero.planned import GIB, QWEN3_BYTES, made, node, planned
from tests.unit.hetero.shapes import QWEN3_8B, QWEN3_NEXT_80B

TOKEN = 147_456
SHARED = {"gpus": 1, "prefillers": 1, "decoders": 1}
ALONE = {"placement": "collocated", "decoders": 1}


def test_host_memory_is_for_what_decoders_park() -> None:
    """One and a half times the decoders' KV of a node, where the host has it."""
    found = made({}, node(cards=3))
    decoders = found.engines[-1]
    assert found.size_gb == int(1.5 * 2 * (decoders.kv_bytes or 0) / GIB) == 161
    assert found.kept_tokens == int(0.72 * found.size_gb * GIB / TOKEN)
    assert found.notes == ()


def test_without_parking_it_is_for_handoffs() -> None:
    found = made({"pausing": False}, node(cards=2))
    # 16 first prompts of 24,500 tokens, in the 72 % that are always kept.
    assert found.size_gb == int(16 * 24_500 * TOKEN / 0.72 / GIB) == 74


def test_it_is_half_of_what_is_free_at_most_and_too_little_is_said() -> None:
    found = made({}, node(cards=2, free=16))
    assert found.size_gb == 8
    (said,) = found.notes
    assert said.startswith("lmcache.size_gb: 8 GiB keep 41,943 tokens")
    assert "19 GiB or more keep 4" in said


def test_what_is_set_is_kept_and_too_little_is_said() -> None:
    found = made({"lmcache.size_gb": 2}, node(cards=2))
    assert found.size_gb == 2
    # 14.5k tokens fit, of which those over four fifths are dropped at any time.
    assert "2 GiB keep 10,485 tokens" in found.notes[0]
    assert made({"lmcache.size_gb": 40}, node(cards=2)).notes == ()


def test_the_containers_limit_caps_the_default_and_is_said() -> None:
    found = made({}, node(cards=2, free=16, limit=20))
    assert found.size_gb == 8
    said = "8 GiB a node, 41,943 tokens at least; 16.0 of the container's limit of 20.0 GiB are"
    assert said in found.lines()[2]
    unknown = made({}, node(cards=2, free=3, limit=20), shape=None, why="model: not to be had")
    assert unknown.size_gb == 1.5


def test_more_than_a_node_has_is_refused_and_more_than_is_free_is_said() -> None:
    said = made({"lmcache.size_gb": 30}, node(cards=2, free=24, limit=64)).notes[0]
    assert said.startswith("lmcache.size_gb: 30 GiB, and a node has 24.0 GiB available")
    with pytest.raises(SettingsError, match=r"size_gb: 65 GiB, and 24.0 of the container's limit"):
        made({"lmcache.size_gb": 65}, node(cards=2, free=24, limit=64))


def test_the_log_has_all_of_it() -> None:
    lines = made(SHARED, node(free=64)).lines()
    assert lines[0].startswith("1 x prefiller, 0.5 ")
    assert "weights 15.3" in lines[0]
    assert lines[1].endswith("tokens each")
    assert "host memory for KV: 32 GiB a node" in lines[2]
    assert lines[3].startswith("prefillers and decoders both keep conversations")
    assert "(estimated: vLLM measures)" in made({}, node(cards=2)).lines()[1]


def test_an_engine_that_will_find_too_little_is_refused_with_the_sums() -> None:
    """As vLLM refuses it once it has loaded the model and measured."""
    with pytest.raises(SettingsError) as refused:
        made(ALONE, node(gib=24))
    assert str(refused.value) == (
        "decoders: the model does not fit on a GPU, of which an engine may take 22.1 GiB; "
        "15.3 weights + 3.2 reserve + 5.6 KV of the longest sequence (40,960 tokens) = 24.1 GiB; "
        "set engine.max_model_len=26112, which fits, or use more GPUs"
    )
    # What is advised is accepted; so is what may fit, if less is taken than is estimated.
    assert made(ALONE | {"engine.max_model_len": 26112}, node(gib=24)).notes == ()
    (said,) = made(ALONE | {"engine.max_model_len": 32768}, node(gib=24)).notes
    assert "decoder: room for some" in said
    assert "32,768; set engine.max_model_len" in said


@pytest.mark.parametrize(
    "given",
    [
        # 8 GiB of the weights are kept on the host.
        {"engine.cpu_offload_gb": 8},
        {"engine.kv_cache_dtype": "fp8"},
        {"engine.tensor_parallel_size": 2},
        {"engine.max_model_len": -1},
        {"engine.num_gpu_blocks_override": 512},
    ],
)
def test_what_makes_it_fit_is_reckoned_with(given: dict[str, Any]) -> None:
    nodes = node(cards=int(given.get("engine.tensor_parallel_size", 1)), gib=24)
    assert made({**ALONE, **given}, nodes)


@pytest.mark.parametrize(
    ("kv_bytes", "said"),
    [
        (2 * GIB, "2.0 GiB hold 14,560 tokens, .* 40,960.*; set engine.max_model_len=14560"),
        # No length of a sequence helps.
        (2**20, "0.0 GiB hold 0 tokens, .*; give it more$"),
    ],
)
def test_a_kv_space_that_is_set_too_small_is_refused(kv_bytes: int, said: str) -> None:
    with pytest.raises(SettingsError, match=rf"^decoders: engine.kv_cache_memory_bytes: {said}"):
        made({**ALONE, "engine.kv_cache_memory_bytes": kv_bytes}, node())


def test_a_model_that_is_not_known_is_no_obstacle_where_engines_measure() -> None:
    found = made({}, node(cards=2), shape=None, why="model: not to be had")
    assert found.size_gb == 2
    assert found.kept_tokens is None
    assert found.notes[0].startswith("model: not to be had; so what engines hold")


def test_where_it_is_one_the_reason_is_said() -> None:
    with pytest.raises(SettingsError, match="model: not to be had"):
        made(SHARED, node(), shape=None, why="model: not to be had")


@pytest.mark.parametrize(
    ("given", "block", "chunk"), [({}, 1024, 1024), ({"engine.block_size": 544}, 544, 544)]
)
def test_a_model_with_states_gets_blocks_that_chunks_can_follow(
    given: dict[str, Any], block: int, chunk: int
) -> None:
    hybrid = shape_of(QWEN3_8B | {"full_attention_interval": 4}, QWEN3_BYTES)
    settings, _ = planned(given, node(), shape=hybrid)
    assert settings.engine.get("block_size") == block
    assert chunk_tokens(settings, gpu=True) == chunk
    assert "block_size" not in planned({}, node())[0].engine


@pytest.mark.parametrize(
    ("state_dtype", "given", "block"),
    [
        # A state of 2.1 MiB beside 2 KiB of KV a token and layer.
        ("float32", {}, 2048),
        # Half the KV, with a state of 1.05 MiB.
        ("auto", {"engine.kv_cache_dtype": "fp8"}, 2048),
        ("float32", {"engine.kv_cache_dtype": "fp8"}, 3072),
    ],
)
def test_blocks_are_as_large_as_a_state(
    state_dtype: str, given: dict[str, Any], block: int
) -> None:
    shape = shape_of(QWEN3_NEXT_80B, 40 * GIB, state_dtype=state_dtype)
    settings, _ = planned(given, node(), shape=shape)
    assert settings.engine["block_size"] == block


def test_states_take_host_memory_beside_what_attention_keeps() -> None:
    """24 KiB of KV a token, and each turn of 3,272 tokens a snapshot of 36 states of 1.05 MiB."""
    shape = shape_of(QWEN3_NEXT_80B, 40 * GIB)
    assert shape.states == (36, 1_097_728)
    found = made({"lmcache.size_gb": 64}, node(), shape=shape)
    token = 24 * 1024 + 36 * 1_097_728 / 3272
    assert found.kept_tokens == int(0.72 * 64 * GIB / token)
