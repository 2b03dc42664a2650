"""Vision towers in the plan, against published sizes and what vLLM logs when it starts."""

from dataclasses import replace
from typing import Any

import pytest

from conserve.settings import Settings, SettingsError, load
from hetero import cpu_plan
from hetero.cards import Card
from hetero.container import HostMemory
from hetero.engine_needs import Needs, encoder_needs, needs
from hetero.gpu_plan import GpuPlan
from hetero.model_shape import ModelShape, shape_of
from hetero.vision_tower import Tower, TowerNeeds
from tests.unit.hetero import planned as plans
from tests.unit.hetero.planned import GIB, MIB, needs_of, node
from tests.unit.hetero.shapes import (
    GEMMA3_4B,
    QWEN3_8B,
    QWEN25_VL_7B,
    QWEN25_VL_PROCESSOR,
    SMOLVLM_2B,
    SMOLVLM_PROCESSOR,
)

H100 = 81_559 * MIB
QWEN = shape_of(QWEN25_VL_7B, 16_584_333_312, processor=QWEN25_VL_PROCESSOR)
SMOL = shape_of(SMOLVLM_2B, processor=SMOLVLM_PROCESSOR)
WITHOUT_VIDEOS = {"limit_mm_per_prompt": {"video": 0}}
# The most values of a patch that vLLM's modules were seen to have: 17,966 and 13,823.
QWEN_PATCH, SMOL_PATCH = 17_836, 13_804


def tower(shape: ModelShape) -> Tower:
    assert shape.tower is not None
    return shape.tower


def needed(shape: ModelShape, **arguments: Any) -> Needs:
    return needs(shape, {"max_num_batched_tokens": 8192, **arguments}, Card("NVIDIA H100", H100))


def of_tower(shape: ModelShape, **arguments: Any) -> TowerNeeds:
    found = needed(shape, **arguments).tower
    assert found is not None
    return found


def test_parameters_are_as_published() -> None:
    # Qwen2.5-VL-7B's 8,292,166,656, less Qwen2.5-7B's 7,615,616,512.
    assert tower(QWEN).parameters == pytest.approx(676_550_144, rel=2e-3)
    assert shape_of(QWEN25_VL_7B).weights_bytes == pytest.approx(16_584_333_312, rel=2e-3)
    # SigLIP so400m, and a projector of 9 x 1,152 to 2,048 values.
    assert tower(SMOL).parameters == pytest.approx(411e6 + 9 * 1152 * 2048, rel=0.01)
    assert shape_of(SMOLVLM_2B).weights_bytes == pytest.approx(2 * 2.25e9, rel=0.01)


def test_the_largest_image_is_as_the_processor_limits_it() -> None:
    assert tower(QWEN).image == 12_845_056 // 28**2 == 16_384
    smaller = shape_of(QWEN25_VL_7B, processor={**QWEN25_VL_PROCESSOR, "max_pixels": 1280 * 784})
    assert tower(smaller).image == 1280
    # 16 tiles and the whole, of 81 embeddings.
    assert tower(SMOL).image == 17 * 81
    uncut = shape_of(SMOLVLM_2B, processor={**SMOLVLM_PROCESSOR, "do_image_splitting": False})
    assert tower(uncut).image == 81
    assert tower(shape_of(SMOLVLM_2B)).image == 17 * 81
    assert tower(shape_of(GEMMA3_4B | {"vocab_size": 9, "text_config": QWEN3_8B})).image == 256


def test_the_largest_batch_is_the_one_that_vllm_measures() -> None:
    """vLLM logs it: "budget of 114688 tokens, and profiled with 1 video items"."""
    assert of_tower(QWEN).batch == "1 video of 114,688 embeddings"
    assert of_tower(QWEN).embeddings == 114_688
    # Fewer frames fit into shorter sequences; without videos one image is the most.
    assert of_tower(QWEN, max_model_len=32_768).batch == "1 video of 32,768 embeddings"
    assert of_tower(QWEN, max_model_len=8_192).batch == "1 image of 16,384 embeddings"
    assert of_tower(QWEN, **WITHOUT_VIDEOS).batch == "1 image of 16,384 embeddings"
    videos_alone = of_tower(QWEN, max_model_len=8_192, limit_mm_per_prompt={"image": 0})
    assert videos_alone.batch == "1 video of 16,384 embeddings"
    assert of_tower(SMOL).batch == "5 images of 1,377 embeddings"
    assert of_tower(SMOL).embeddings == 8_192
    assert of_tower(SMOL, max_num_seqs=1, limit_mm_per_prompt={"image": {"count": 2}}).batch == (
        "2 images of 1,377 embeddings"
    )


def test_encoding_and_the_cache_take_what_their_values_do() -> None:
    alone = of_tower(QWEN, **WITHOUT_VIDEOS)
    # Four patches an embedding.
    assert alone.encode_bytes == 16_384 * 4 * QWEN_PATCH * 2
    assert alone.cache_bytes == 16_384 * 3584 * 2
    assert of_tower(QWEN).encode_bytes == 7 * alone.encode_bytes
    # Nine patches, and the cache is as large as a step.
    assert of_tower(SMOL).encode_bytes == 5 * 1_377 * 9 * SMOL_PATCH * 2
    assert of_tower(SMOL).cache_bytes == 8_192 * 2_048 * 2
    # A step waits while an engine encodes, so the larger one counts.
    step = 8192 * QWEN.step_width * 2 + 1024 * 152_064 * 12
    assert needed(QWEN).reserve_bytes == 2 * GIB + of_tower(QWEN).encode_bytes
    assert needed(QWEN, **WITHOUT_VIDEOS).reserve_bytes == 2 * GIB + step
    assert needed(QWEN).fixed_bytes == sum(
        (16_584_333_312, needed(QWEN).reserve_bytes, of_tower(QWEN).cache_bytes)
    )


def test_workers_divide_a_tower_or_the_images() -> None:
    one, two = needed(QWEN), needed(QWEN, tensor_parallel_size=2)
    assert one.tower
    assert two.tower
    assert two.weights_bytes == one.weights_bytes // 2
    assert two.tower.encode_bytes == one.tower.encode_bytes // 2
    assert two.tower.cache_bytes == one.tower.cache_bytes
    # Each has all of the tower, and one of them all of the only video.
    whole = of_tower(QWEN, tensor_parallel_size=2, mm_encoder_tp_mode="data")
    assert (whole.weights_bytes, whole.encode_bytes) == (
        one.tower.weights_bytes,
        one.tower.encode_bytes,
    )
    # vLLM divides this one's weights nevertheless, but not 16 heads by 3.
    other = of_tower(SMOL, tensor_parallel_size=2, mm_encoder_tp_mode="data")
    assert other.weights_bytes == of_tower(SMOL).weights_bytes // 2
    assert of_tower(SMOL, tensor_parallel_size=3).weights_bytes == of_tower(SMOL).weights_bytes
    # Every stage has the tower.
    stages = needed(QWEN, pipeline_parallel_size=2)
    text = one.weights_bytes - one.tower.weights_bytes
    assert stages.weights_bytes == text // 2 + one.tower.weights_bytes


@pytest.mark.parametrize(
    "given", [{"language_model_only": True}, {"limit_mm_per_prompt": {"image": 0, "video": 0}}]
)
def test_an_engine_that_takes_text_only_loads_no_tower(given: dict[str, Any]) -> None:
    found = needed(QWEN, **given)
    assert found.tower is None
    assert found.weights_bytes == 16_584_333_312 - 2 * tower(QWEN).parameters


def test_an_engine_that_only_encodes_has_a_tower_and_a_context() -> None:
    found = encoder_needs(SMOL, {"max_num_batched_tokens": 8192})
    assert found is not None
    own = of_tower(SMOL)
    assert found.fixed_bytes == own.weights_bytes + own.encode_bytes + own.cache_bytes + GIB
    assert encoder_needs(shape_of(QWEN3_8B), {"max_num_batched_tokens": 8192}) is None


def planned(
    arguments: dict[str, Any],
    shape: ModelShape = QWEN,
    cards: int = 2,
    free: float = 512,
    memory: int = H100,
) -> tuple[Settings, GpuPlan]:
    return plans.planned(arguments, node(cards, memory / GIB, free), shape=shape)


def test_videos_that_take_most_of_a_card_are_named() -> None:
    _, found = planned({})
    (said,) = found.notes
    assert said == (
        "each engine has 15.2 GiB to encode 1 video of 114,688 embeddings, as vLLM does when it "
        "starts; if agents send no videos, engine.limit_mm_per_prompt.video=0 leaves most of it to "
        "KV"
    )
    assert planned({"engine.limit_mm_per_prompt.video": 0})[1].notes == ()
    with pytest.raises(SettingsError, match=r"17\.2 reserve \+ 0\.8 encoder cache .* KV") as caught:
        planned({"gpus": 1, "prefillers": 1}, memory=48 * GIB)
    said = "leave videos out, which take 32.0 GiB (engine.limit_mm_per_prompt.video=0), or set"
    assert said in str(caught.value)
    kept = {"gpus": 1, "prefillers": 1, "engine.limit_mm_per_prompt.video": 0}
    assert len(planned(kept, memory=64 * GIB)[1].engines) == 2


def test_layers_that_are_not_on_the_gpu_leave_their_memory_to_kv() -> None:
    layer = 4 * 1280**2 + 3 * 1280 * 3420
    assert (tower(QWEN).layers, tower(QWEN).layer_parameters) == (32, layer)
    text = {"pausing": False, "engine.limit_mm_per_prompt": {"video": 0}}
    _, whole = planned(text)
    _, found = planned({**text, "media.tower_layers": 2})
    freed = 30 * layer * 2
    for engine, other in zip(whole.engines, found.engines, strict=True):
        before, after = needs_of(engine), needs_of(other)
        assert after.weights_bytes == before.weights_bytes - freed
        assert other.kv_bytes == (engine.kv_bytes or 0) + freed
        assert (before.host_bytes, after.host_bytes) == (0, 32 * layer * 2)
        assert after.tower is not None
        assert after.tower.kept == "2 of its 32 layers"
    # Two engines have all layers in the node's memory, which LMCache does not get.
    assert "encoded ones, 2.3 GiB for layers of vision towers, and up to" in found.images
    small = {"pausing": False, "media.encoded_gb": 0}
    assert planned(small, QWEN, free=16)[1].size_gb == 8
    assert planned({**small, "media.tower_layers": 2}, QWEN, free=16)[1].size_gb == 6
    with pytest.raises(SettingsError, match=r"by media.tower_layers: 2\.3 GiB, and 38\.0 of"):
        planned({"lmcache.size_gb": 37, "media.tower_layers": 2}, QWEN, free=38)
    # Workers divide what they divide.
    halved = needs(
        QWEN.keeping(2), {"max_num_batched_tokens": 8192, "tensor_parallel_size": 2}, None
    )
    assert halved.host_bytes == 32 * layer


def test_a_model_whose_tower_fits_only_in_parts_is_planned() -> None:
    large = {**QWEN25_VL_7B["vision_config"], "depth": 320}
    shape = shape_of(QWEN25_VL_7B | {"vision_config": large}, processor=QWEN25_VL_PROCESSOR)
    asked = {"prefillers": 0, "decoders": 1, "gpus": 1, "engine.max_model_len": 2048,
             "engine.limit_mm_per_prompt.video": 0}  # fmt: skip
    with pytest.raises(SettingsError, match=r"26\.\d weights"):
        planned(asked, shape, cards=1, memory=26 * GIB)
    planned({**asked, "media.tower_layers": 2}, shape, cards=1, memory=26 * GIB)


def test_an_engine_that_encodes_beside_its_steps_has_room_for_both() -> None:
    given = {"engine.limit_mm_per_prompt.video": 0}

    def reserves(shape: ModelShape, **more: Any) -> list[int]:
        _, found = planned({**given, **more}, shape)
        return [needs_of(one).reserve_bytes for one in found.engines]

    without, beside = reserves(QWEN), reserves(QWEN, engine_scheduler="conversation_lane")
    both = needed(QWEN, **WITHOUT_VIDEOS)
    assert both.tower is not None
    assert 0 < both.beside_bytes <= both.tower.encode_bytes
    more = [one - other for one, other in zip(beside, without, strict=True)]
    assert more == [both.beside_bytes] * 2
    text = replace(QWEN, tower=None)
    assert reserves(text, engine_scheduler="conversation_lane") == reserves(text)


def test_an_encoder_keeps_its_tower_whole() -> None:
    """It has no KV to which the memory could go."""
    given = {"encoders": 1, "decoders": 1, "prefillers": 1, "media.tower_layers": 1}
    _, found = planned(given, SMOL, cards=3)
    assert [bool(needs_of(one).host_bytes) for one in found.engines] == [False, True, True]


def test_an_encoder_that_is_not_known_is_named() -> None:
    for config in (
        {"model_type": "internvl_chat", "vision_config": {"hidden_size": 1024}},
        {"model_type": "qwen3_omni", "thinker_config": {"x": 1}},
        {"model_type": "llava", "vision_config": {"hidden_size": 1024}},
    ):
        shape = shape_of(QWEN3_8B | config, 16_381_470_720)
        assert shape.sees
        _, found = planned({}, shape)
        (said,) = found.notes
        assert "is not known" in said or "has no depth or num_hidden_layers" in said
        assert "its memory is not counted" in said
        assert "host memory for images" in found.lines()[-1]


def test_encoded_images_are_counted_beside_lmcache() -> None:
    with pytest.raises(SettingsError) as caught:
        planned({"lmcache.size_gb": 40}, SMOL, free=40)
    assert str(caught.value) == (
        "lmcache.size_gb: 40 and media.encoded_gb: 0.9 GiB, and 40.0 of 40.0 GiB are available; "
        "set less"
    )
    planned({"lmcache.size_gb": 40, "media.encoded_gb": 0}, SMOL, free=40)
    # Half of what is free, less what is for images.
    assert planned({"media.encoded_gb": 8.6}, SMOL, free=16)[1].size_gb == 3
    assert planned({"media.encoded_gb": 0}, SMOL, free=16)[1].size_gb == 8


@pytest.mark.parametrize(("free", "gib"), [(512, 4.0), (64, 4.0), (24, 1.5), (1, 0.1)])
def test_prepared_images_take_a_quarter_of_the_free_memory_at_most(free: float, gib: float) -> None:
    """Two engines have two caches each."""
    settings, found = planned({"media.encoded_gb": 0}, SMOL, free=free)
    # At 4 vLLM's default stays.
    assert settings.engine.get("mm_processor_cache_gb", 4.0) == gib
    assert f"up to {gib:g} GiB for prepared ones" in found.images
    told, found = planned({"decoders.engine.mm_processor_cache_gb": 2}, SMOL, free=free)
    assert "mm_processor_cache_gb" not in told.engine


def test_engines_on_cpus_are_planned_with_images_too() -> None:
    def made(gib: float, **arguments: Any) -> cpu_plan.CpuPlan:
        memory = HostMemory(int(gib * GIB), int(gib * GIB))
        given = {"model": "m", "engine.max_model_len": 4096, **arguments}
        return cpu_plan.plan(load(given), SMOL, memory)[1]

    assert "1 GB a node for encoded ones, and up to 1.3 GiB" in made(32).images
    with pytest.raises(SettingsError, match=r"2 for LMCache \+ 0\.9 for encoded images = 18\.\d"):
        made(18)
    assert made(18, **{"media.encoded_gb": 0}).weights_bytes
