"""Engines on GPUs: how many, and what of a GPU each gets. Figures are worked out by hand."""

import re
from dataclasses import replace
from typing import Any

import pytest

from conserve.settings import Settings, SettingsError, load
from hetero.cards import Card
from hetero.gpu_layout import EnginePlan, with_counts, with_memory
from hetero.model_shape import ModelShape, shape_of
from tests.unit.hetero.planned import GIB, MIB, needs_of
from tests.unit.hetero.shapes import QWEN3_8B, QWEN25_VL_7B, QWEN25_VL_PROCESSOR

H100, A40, RTX_4090 = 81_559 * MIB, 46_068 * MIB, 24_564 * MIB
SHAPE = shape_of(QWEN3_8B)
# Parameters, without norms, in 16 bits: two tables, and 36 layers of attention and gates.
WEIGHTS = 2 * (2 * 151_936 * 4096 + 36 * (2 * 4096 * 40 * 128 + 3 * 4096 * 12_288))
TOKEN = 147_456
# 1 GiB of context, 1 of graphs; 8,192 tokens of three times what they are between layers, and of
# both gates and their product; the sampler's three rows of 32 bits for each sequence.
STEP = 8192 * (3 * 4096 + 3 * 12_288) * 2
LARGE_RESERVE = 2 * GIB + STEP + 1024 * 151_936 * 12
RESERVE = 2 * GIB + STEP + 256 * 151_936 * 12
PAPER = {"placement": "conversation"}
SHARED: dict[str, Any] = {"gpus": 1, "prefillers": 1, "decoders": 1}


def laid_out(
    arguments: dict[str, Any],
    gpus: int,
    card: int | None,
    shape: ModelShape | None = SHAPE,
    name: str = "NVIDIA",
) -> tuple[Settings, list[EnginePlan]]:
    settings = with_counts(load({"model": "m", **arguments}), gpus)
    found = None if card is None else Card(name, card)
    return with_memory(
        settings, shape, dict.fromkeys(("encoders", "prefillers", "decoders"), found)
    )


def test_a_prefiller_and_a_decoder_share_one_h100() -> None:
    settings, (prefiller, decoder) = laid_out(PAPER, 1, H100)
    assert (settings.prefillers.replicas, settings.decoders.replicas) == (1, 1)
    usable = int(H100 * 0.92)
    # 73.3 GiB, less two times 15.3 of weights and 4.5 of reserve, are 33.8 GiB: 246,025 tokens.
    pool = usable - 2 * (WEIGHTS + LARGE_RESERVE)
    assert pool // TOKEN == 246_025
    assert prefiller.kv_tokens == pytest.approx(246_025 / 4, abs=60)
    assert decoder.kv_tokens == pytest.approx(246_025 * 3 / 4, abs=60)
    told = settings.decoders.engine
    assert told["kv_cache_memory_bytes"] == decoder.kv_bytes
    # Each is started when the other has what it will have: vLLM wants its part free.
    assert told["gpu_memory_utilization"] == pytest.approx(0.92 * decoder.num_gpus, abs=1e-4)


def test_one_gpu_has_one_engine_unless_more_are_asked_for() -> None:
    for asked in ({}, {"gpus": 1}, {"placement": "collocated"}):
        settings, plans = laid_out(asked, 1, H100)
        assert [(one.role, one.replicas, one.num_gpus) for one in plans] == [("decoder", 1, 1)]
        assert plans[0].kv_tokens == (int(H100 * 0.92) - WEIGHTS - LARGE_RESERVE) // TOKEN
        assert settings.decoders.engine == {}
    # VLLM takes fewer sequences at a time on an A100, whatever its memory.
    _, (smaller,) = laid_out({}, 1, H100, name="NVIDIA A100-SXM4-80GB")
    assert smaller.kv_tokens == (int(H100 * 0.92) - WEIGHTS - RESERVE) // TOKEN
    _, plans = laid_out({"gpus": 1, "decoders": 2}, 1, H100)
    assert [(one.role, one.replicas, one.num_gpus) for one in plans] == [("decoder", 2, 0.5)]
    _, plans = laid_out({**SHARED}, 1, H100)
    assert [one.role for one in plans] == ["prefiller", "decoder"]


def test_parts_do_not_add_up_to_more_than_a_gpu() -> None:
    """By Ray's account, by vLLM's check at start, and by what they will have taken."""
    asked = {**SHARED, "decoders": 2, "engine.max_model_len": 16384}
    settings, plans = laid_out(asked, 1, H100)
    assert sum(one.replicas * one.num_gpus for one in plans) <= 1
    usable = 0.0
    for one, own in zip(plans, (settings.prefillers, settings.decoders), strict=True):
        taken = needs_of(one).fixed_bytes + (one.kv_bytes or 0)
        assert taken <= own.engine["gpu_memory_utilization"] * H100 + 1e-4 * H100
        usable += one.replicas * taken
    assert usable <= 0.92 * H100


@pytest.mark.parametrize(
    ("asked", "gpus", "engines"),
    [
        ({}, 8, (1, 7)),
        ({"prefillers": 2}, 8, (2, 6)),
        ({"engine.tensor_parallel_size": 2}, 8, (1, 3)),
        ({"engine.tensor_parallel_size": 2, "prefillers": 3}, 8, (3, 1)),
    ],
)
def test_more_gpus_are_for_more_decoders(
    asked: dict[str, Any], gpus: int, engines: tuple[int, int]
) -> None:
    settings, plans = laid_out(asked, gpus, H100)
    assert (settings.prefiller_replicas, settings.decoders.replicas) == engines
    assert plans[-1].workers == asked.get("engine.tensor_parallel_size", 1)


def test_two_engines_do_not_fit_on_24_gb_and_the_sums_are_said() -> None:
    with pytest.raises(SettingsError) as caught:
        laid_out(SHARED, 1, RTX_4090)
    said = str(caught.value)
    assert "do not fit on one GPU of 24.0 GiB, of which they may take 22.1" in said
    assert "1 x decoder: 15.3 weights + 3.2 reserve + 5.6 KV" in said
    assert "(40,960 tokens) = 24.1 GiB" in said
    assert "together 48.1 GiB" in said
    assert "prefillers=0" in said


def test_a_prefiller_has_room_for_the_longest_sequence() -> None:
    longest = {**PAPER, "engine.max_model_len": 100_000}
    _, (prefiller, decoder) = laid_out(longest, 1, H100)
    assert 100_000 <= (prefiller.kv_tokens or 0) < 100_200
    assert decoder.kv_tokens == pytest.approx(146_000, abs=200)


def test_several_engines_on_each_of_two_gpus_get_like_parts() -> None:
    """Ray chooses who shares with whom, so a part is the same for all."""
    settings, plans = laid_out({"gpus": 2, "decoders": 3, "engine.max_model_len": 8192}, 4, H100)
    assert [one.num_gpus for one in plans] == [0.5, 0.5]
    half = int(H100 * 0.92 * 0.5) - WEIGHTS - LARGE_RESERVE
    assert settings.decoders.engine["kv_cache_memory_bytes"] == half


def test_engines_that_are_to_scale_have_their_parts_from_the_start() -> None:
    arguments = {"gpus": 1, "decoders.max_replicas": 2, "engine.max_model_len": 16384}
    settings, (decoder,) = laid_out({**arguments, "decoders.replicas": 1}, 1, H100)
    assert decoder.replicas == 2
    assert settings.decoders.replicas == 1


def test_parts_by_hand_are_kept_and_measured_out() -> None:
    arguments = {"prefillers.num_gpus": 0.4, "decoders.num_gpus": 0.6, "decoders": 1}
    settings, (_, decoder) = laid_out(arguments, 1, H100)
    assert settings.decoders.num_gpus == 0.6
    assert decoder.kv_bytes == int(H100 * 0.92 * 0.6) - WEIGHTS - LARGE_RESERVE
    # What all of a GPU's engines may take is for the operator to say, and so is KV.
    settings, (_, decoder) = laid_out({**arguments, "engine.gpu_memory_utilization": 0.8}, 1, H100)
    assert decoder.kv_bytes == int(H100 * 0.8 * 0.6) - WEIGHTS - LARGE_RESERVE
    assert settings.decoders.engine["gpu_memory_utilization"] == 0.48
    settings, _ = laid_out({**arguments, "engine.kv_cache_memory_bytes": GIB}, 1, None, None)
    assert settings.decoders.engine["kv_cache_memory_bytes"] == GIB


def test_kv_that_is_set_for_one_engine_leaves_the_rest_to_the_other() -> None:
    told = {"decoders.engine.kv_cache_memory_bytes": 20 * GIB}
    settings, (prefiller, decoder) = laid_out({**SHARED, **told}, 1, H100)
    assert decoder.kv_bytes == settings.decoders.engine["kv_cache_memory_bytes"] == 20 * GIB
    pool = int(H100 * 0.92) - 2 * (WEIGHTS + LARGE_RESERVE)
    assert prefiller.kv_bytes == pytest.approx(pool - 20 * GIB, abs=2 * H100 / 10_000)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        # Of 33.8 GiB, a prefiller's longest sequence takes 5.6.
        ({**SHARED, "decoders.engine.kv_cache_memory_bytes": 30 * GIB}, "^gpus: .* 28.2 GiB of KV"),
        ({"engine.kv_cache_memory_bytes": 64 * GIB}, "^decoders: .* on a GPU.* 58.9 GiB of KV"),
        (
            {"decoders.num_gpus": 0.5, "decoders": 1, "engine.kv_cache_memory_bytes": 30 * GIB},
            "^decoders: .* 0.5 of a GPU.* 16.9 GiB of KV",
        ),
    ],
)
def test_more_kv_than_there_is_room_for_is_refused(arguments: dict[str, Any], said: str) -> None:
    """Engines would take the memory of another engine, or end when it needs its own."""
    with pytest.raises(SettingsError, match=rf"{said}: set less engine\.kv_cache.*, or unset it$"):
        laid_out(arguments, 1, H100)


@pytest.mark.parametrize(
    ("arguments", "gpus", "said"),
    [
        ({}, 1, "set engine.tensor_parallel_size=4 (4 GPUs an engine), or use a model of at most"),
        (
            {"engine.tensor_parallel_size": 2, "decoders": 1, "prefillers": 0}, 2,
            "give each engine 4 GPUs (a larger tensor_parallel_size), or use a model of at most "
            "132.7 GiB",
        ),
        ({**SHARED, "prefillers": 0, "encoders": 1}, 1, "; set encoders=0, or use larger GPUs"),
        (SHARED, 1, "; set prefillers=0 and decoders=1, or use larger GPUs"),
        ({"gpus": 1, "decoders": 2}, 1, "ask for fewer engines, or for a larger part of a GPU"),
    ],
)  # fmt: skip
def test_what_is_in_the_way_of_a_model_is_said(
    arguments: dict[str, Any], gpus: int, said: str
) -> None:
    with pytest.raises(SettingsError, match=re.escape(said)):
        laid_out(arguments, gpus, H100, shape_of(QWEN3_8B, 200 * GIB))
    # Engines of several workers are not asked to share; `hetero.gpu_room` says what is missing.
    alone = with_counts(load({"model": "m", "engine.tensor_parallel_size": 4}), 1)
    assert (alone.decoders.num_gpus, alone.gpus) == (1, None)


def test_all_kv_that_vllm_offers_may_be_set() -> None:
    """Where it is told, vLLM does not heed `gpu_memory_utilization`, and nothing has to be free."""
    kv = H100 - 2 * GIB - WEIGHTS - LARGE_RESERVE
    _, (decoder,) = laid_out({"engine.kv_cache_memory_bytes": kv}, 1, H100)
    assert decoder.kv_bytes == kv > int(H100 * 0.92) - WEIGHTS - LARGE_RESERVE


@pytest.mark.parametrize(
    ("asked", "gpus", "card", "shape", "said"),
    [
        # What shares has to be known.
        (SHARED, 1, H100, None, "kv_cache_memory_bytes"),
        ({"prefillers.num_gpus": 0.8, "decoders.num_gpus": 0.2, "decoders": 1}, 1, H100, SHAPE,
         r"decoders: .* 0\.2 of a GPU.* 14\.7 GiB"),
        ({}, 2, 12 * GIB, SHAPE, "prefillers: the model does not fit on a GPU"),
        ({"gpus": 2, "engine.tensor_parallel_size": 2}, 2, H100, SHAPE,
         "2 engines want GPUs of their own"),
    ],
)  # fmt: skip
def test_a_layout_that_cannot_be_is_refused(
    asked: dict[str, Any], gpus: int, card: int | None, shape: ModelShape | None, said: str
) -> None:
    with pytest.raises(SettingsError, match=said):
        laid_out(asked, gpus, card, shape)


def test_a_step_without_graphs_and_with_fewer_sequences_takes_less() -> None:
    smaller = {"engine.enforce_eager": True, "engine.max_num_seqs": 64}
    _, plans = laid_out(smaller, 2, H100)
    assert needs_of(plans[0]).reserve_bytes == GIB + STEP + 64 * 151_936 * 12


def test_slots_of_adapters_are_counted_with_the_weights() -> None:
    slots = {"engine.enable_lora": True, "engine.max_loras": 4, "engine.max_lora_rank": 32}
    (with_slots,), (without,) = (laid_out(one, 1, H100)[1] for one in (slots, {}))
    # The widths, in and out, of attention and gates of 36 layers, and of the last table.
    widths = 36 * (4 * 4096 + 2 * (4096 + 1024) + 3 * (4096 + 12_288)) + 4096 + 151_936
    # Of a quantised model's weights it is not seen how many there are.
    small = replace(SHAPE, quantised=True, weights_bytes=SHAPE.weights_bytes // 4)
    (quantised,) = laid_out(slots, 1, H100, small)[1]
    taken = needs_of(quantised).weights_bytes - small.weights_bytes
    assert 1.0 <= taken / (2 * 4 * 32 * widths) < 1.4
    taken = needs_of(with_slots).weights_bytes - needs_of(without).weights_bytes
    assert 1.0 <= taken / (2 * 4 * 32 * widths) < 1.4


def test_graphs_for_each_border_have_room_of_their_own() -> None:
    slots = {"tiers.x.sm_slots": 7, "decoders.tier": "x", "prefillers.tier": "x"}
    lane = {"engine_scheduler": "conversation_lane"}

    def reserves(**more: Any) -> list[int]:
        _, plans = laid_out({**slots, **more}, 2, H100)
        return [needs_of(one).reserve_bytes for one in plans]

    without = reserves()
    for more, expected in (({}, [GIB, GIB]), (PAPER, [0, GIB])):
        # A prefiller has a lane if it hosts.
        within = reserves(**lane, **more)
        assert [one - other for one, other in zip(within, without, strict=True)] == expected
    eager = {"engine.enforce_eager": True}
    assert reserves(**lane, **eager) == reserves(**eager)


SEES = shape_of(QWEN25_VL_7B, processor=QWEN25_VL_PROCESSOR)
IMAGES = {"encoders": 1, "engine.limit_mm_per_prompt.video": 0}


def with_encoders(
    arguments: dict[str, Any], gpus: int, shape: ModelShape | None = SEES, card: int | None = H100
) -> tuple[Settings, list[EnginePlan]]:
    return laid_out({**IMAGES, **arguments}, gpus, card, shape)


def test_an_encoder_has_a_gpu_of_its_own_for_the_tower_alone() -> None:
    settings, plans = with_encoders({}, 4)
    assert [(one.role, one.replicas, one.num_gpus) for one in plans] == [
        ("encoder", 1, 1),
        ("prefiller", 1, 1),
        ("decoder", 2, 1),
    ]
    assert (plans[0].kv_bytes, plans[0].kv_tokens) == (0, 0)
    encoder, decoder = needs_of(plans[0]), needs_of(plans[-1])
    assert SEES.tower is not None
    assert encoder.weights_bytes == 2 * SEES.tower.parameters
    # Neither graphs nor a step: less than a twentieth of the weights, and less of the rest.
    assert encoder.weights_bytes < 0.1 * decoder.weights_bytes
    assert encoder.reserve_bytes < decoder.reserve_bytes
    assert settings.encoders.engine == {}


def test_an_encoder_that_is_not_known_counts_as_the_whole_model() -> None:
    _, plans = with_encoders({}, 4, shape=SHAPE)
    assert needs_of(plans[0]).weights_bytes == WEIGHTS
    _, plans = with_encoders({}, 4, shape=None, card=None)
    assert plans[0].needs is None
    assert (plans[0].kv_bytes, plans[0].kv_tokens) == (0, None)
    with pytest.raises(SettingsError, match="encoders: the model does not fit on a GPU, of which"):
        with_encoders({}, 4, shape=SHAPE, card=12 * GIB)


@pytest.mark.parametrize("arguments", [{}, {"prefillers": 0, "decoders": 1}])
def test_an_encoder_on_the_one_gpu_has_what_it_needs_and_others_the_rest(
    arguments: dict[str, Any],
) -> None:
    shorter = {"gpus": 1, "engine.max_model_len": 8192}
    settings, plans = with_encoders({**shorter, **arguments}, 1)
    encoder, decoder = plans[0], plans[-1]
    assert sum(one.replicas * one.num_gpus for one in plans) <= 1
    assert 0 <= (encoder.budget_bytes or 0) - needs_of(encoder).fixed_bytes < 0.02 * GIB
    assert "kv_cache_memory_bytes" not in settings.encoders.engine
    assert settings.encoders.engine["gpu_memory_utilization"] < 0.92 * encoder.num_gpus + 1e-4
    assert (decoder.kv_bytes or 0) > 0
