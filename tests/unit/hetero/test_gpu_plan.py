"""The plan as a whole: host memory for handoffs, and what an operator is told."""

from typing import Any

import pytest

from conserve.settings import SettingsError, load
from hetero.cards import Card
from hetero.gpu_layout import with_counts
from hetero.gpu_plan import GpuNode, GpuPlan, plan
from hetero.model_shape import ModelShape, shape_of
from hetero.tiers import NodeOffer
from tests.unit.hetero.shapes import QWEN3_8B

GIB = 2**30
SHAPE = shape_of(QWEN3_8B, 16_381_470_720)
TOKEN = 147_456


def node(cards: int = 1, memory: int = 80, free: int = 512, used: int = 0) -> GpuNode:
    card = Card("NVIDIA H100", memory * GIB, used * GIB)
    offer = NodeOffer("10.0.0.1", {"CPU": 8.0, "GPU": float(cards)}, {})
    return GpuNode(offer, (card,) * cards, free * GIB)


def made(
    arguments: dict[str, Any], *nodes: GpuNode, shape: ModelShape | None = SHAPE, why: str = ""
) -> GpuPlan:
    gpus = sum(len(one.cards) for one in nodes)
    _, found = plan(with_counts(load({"model": "m", **arguments}), gpus), nodes, shape, why)
    return found


def test_host_memory_is_for_what_decoders_park() -> None:
    """One and a half times the decoders' KV of a node, where the host has it."""
    found = made({}, node(cards=3))
    decoders = found.engines[-1]
    assert decoders.kv_bytes is not None
    assert found.size_gb == int(1.5 * 2 * decoders.kv_bytes / GIB) == 161
    assert found.kept_tokens == int(0.64 * found.size_gb * GIB / TOKEN)
    assert found.notes == ()


def test_without_parking_it_is_for_handoffs() -> None:
    found = made({"parking": False}, node(cards=2))
    # 16 first prompts of 24,500 tokens, in the 64 % that are always kept.
    assert found.size_gb == int(16 * 24_500 * TOKEN / 0.64 / GIB) == 84


def test_it_is_half_of_what_is_free_at_most_and_too_little_is_said() -> None:
    found = made({}, node(cards=2, free=16))
    assert found.size_gb == 8
    (said,) = found.notes
    assert said.startswith("lmcache.size_gb: 8 GiB keep 37,282 tokens")
    assert "21 GiB or more keep 4" in said


def test_what_is_set_is_kept_and_too_little_is_said() -> None:
    found = made({"lmcache.size_gb": 2}, node(cards=2))
    assert found.size_gb == 2
    # 14.5k tokens fit, of which those over four fifths are dropped at any time.
    assert "2 GiB keep 9,320 tokens" in found.notes[0]
    assert made({"lmcache.size_gb": 40}, node(cards=2)).notes == ()


def test_the_log_has_all_of_it() -> None:
    lines = made({}, node(free=64)).lines()
    assert lines[0].startswith("1 x prefiller, 0.5 ")
    assert "weights 15.3" in lines[0]
    assert lines[1].endswith("tokens each")
    assert "host memory for handoffs: 32 GiB a node" in lines[2]
    assert "(estimated: vLLM measures)" in made({}, node(cards=2)).lines()[1]


def test_a_card_that_others_use_is_named_where_engines_share_it() -> None:
    (said,) = made({}, node(used=20)).notes
    assert "20.0 of 80.0 GiB are taken by others" in said


def test_gpus_that_stay_idle_are_counted() -> None:
    (said,) = made({"decoders": 2}, node(cards=8)).notes
    assert said == "5 of 8 GPUs have no engine"


def test_an_engine_that_will_find_too_little_is_told_in_advance() -> None:
    arguments = {"placement": "collocated", "decoders": 1}
    said = made(arguments, node(memory=24)).notes[0]
    assert "decoder: room for some" in said
    assert "40,960; set engine.max_model_len" in said


def test_a_model_that_is_not_known_is_no_obstacle_where_engines_measure() -> None:
    found = made({}, node(cards=2), shape=None, why="model: not to be had")
    assert found.size_gb == 2
    assert found.kept_tokens is None
    assert found.notes[0].startswith("model: not to be had; so what engines hold")


def test_where_it_is_one_the_reason_is_said() -> None:
    with pytest.raises(SettingsError, match="model: not to be had"):
        made({}, node(), shape=None, why="model: not to be had")


def test_an_estimate_of_weights_is_called_one() -> None:
    (said,) = made({}, node(cards=2), shape=shape_of(QWEN3_8B)).notes
    assert "computed from config.json" in said


@pytest.mark.parametrize(
    ("given", "block", "chunk"),
    [
        ({}, 1024, 1024),
        ({"engine.block_size": 544}, 544, 544),
        # Whoever says either has looked.
        ({"lmcache.chunk_tokens": 784}, None, 784),
    ],
)
def test_a_model_with_states_gets_blocks_that_chunks_can_follow(
    given: dict[str, Any], block: int | None, chunk: int
) -> None:
    from deployments.app import _for_device

    hybrid = shape_of(QWEN3_8B | {"full_attention_interval": 4}, 16_381_470_720)
    asked = with_counts(load({"model": "m", **given}), 1)
    settings, _ = plan(asked, [node()], hybrid)
    assert settings.engine.get("block_size") == block
    assert _for_device(settings, gpu=True).lmcache.chunk_tokens == chunk
    plain, _ = plan(with_counts(load({"model": "m"}), 1), [node()], SHAPE)
    assert "block_size" not in plain.engine
