"""GPUs and host memory divided among several models. Figures are worked out by hand."""

from typing import Any

import pytest

from conserve.settings import Settings, SettingsError, load
from hetero.container import HostMemory
from hetero.cpu_plan import plan as cpu_plan
from hetero.gpu_division import divided
from hetero.gpu_plan import GpuNode, GpuPlan, gpus_of, plan_each
from hetero.gpu_room import Crowd, most_on_node, require_slots, short_of_gpus
from hetero.host_memory import chunk_tokens, require_one_chunk
from hetero.model_shape import ModelShape, shape_of
from tests.unit.hetero.planned import GIB, QWEN3, needs_of, node
from tests.unit.hetero.shapes import QWEN3_06B

SMALL = shape_of(QWEN3_06B, 1_503_300_328)
SHAPES = {"large": QWEN3, "small": SMALL}
ALONE = {"decoders": 1, "prefillers": 0}


def two(large: dict[str, Any] | None = None, small: Any = None, **common: Any) -> Settings:
    return load({**common, "models": {"large": large or {}, "small": small or {}}})


def counts(settings: Settings, gpus: int, weights: dict[str, int] | None = None) -> dict[str, Any]:
    """How many prefillers and decoders each model has."""
    known = {name: shape.weights_bytes for name, shape in SHAPES.items()}
    found = divided(settings, gpus, known if weights is None else weights)
    return {name: (own.prefiller_replicas, own.decoders.replicas)
            for name, own in found.each.items()}  # fmt: skip


def planned(
    settings: Settings, *nodes: GpuNode, shapes: dict[str, ModelShape] | None = None
) -> tuple[Settings, GpuPlan]:
    found = SHAPES if shapes is None else shapes
    weights = {name: shape.weights_bytes for name, shape in found.items()}
    chosen = divided(settings, gpus_of(nodes), weights)
    return plan_each(chosen, nodes, {name: (shape, "") for name, shape in found.items()})


def test_more_gpus_go_to_the_larger_model() -> None:
    assert counts(two(), 2) == {"large": (0, 1), "small": (0, 1)}
    # 15.3 GiB and 1.4: the eighth GPU would have 15.3 / 8 or 1.4 / 2.
    assert counts(two(), 8) == {"large": (1, 6), "small": (0, 1)}
    assert counts(two(), 8, {}) == {"large": (1, 3), "small": (1, 3)}
    assert counts(two(small={"gpus": 3}), 8) == {"large": (1, 4), "small": (1, 2)}
    # An engine at a time: the ninth GPU is too few for one of two.
    wide = {"prefillers": 0, "engine": {"tensor_parallel_size": 2}}
    assert counts(two(wide, ALONE), 8) == {"large": (0, 3), "small": (0, 1)}
    # Decoders that may come later find their GPUs then.
    later = {"prefillers": 0, "decoders": {"replicas": 1, "max_replicas": 9}}
    assert counts(two(later), 3) == {"large": (0, 1), "small": (1, 1)}


def test_one_gpu_has_both_in_parts_by_their_needs() -> None:
    settings, plan = planned(two(), node())
    large, small = plan.engines
    usable = 0.92 * 80 * GIB
    assert large.num_gpus + small.num_gpus == pytest.approx(1, abs=3e-4)
    taken = 0
    for one, own in zip(plan.engines, settings.each.values(), strict=True):
        assert (one.kv_bytes or 0) >= needs_of(one).least_kv_bytes
        told = own.decoders.engine
        assert told["kv_cache_memory_bytes"] == one.kv_bytes
        assert told["gpu_memory_utilization"] == pytest.approx(0.92 * one.num_gpus, abs=1e-4)
        assert own.decoders.num_gpus == one.num_gpus
        taken += needs_of(one).fixed_bytes + (one.kv_bytes or 0)
    assert 0.999 * usable < taken <= usable
    # What no engine needs is divided by weights.
    more = [(one.kv_bytes or 0) - needs_of(one).least_kv_bytes for one in plan.engines]
    assert more[0] / more[1] == pytest.approx(15.26 / 1.4, rel=0.01)
    assert "; 73.6 together of the one that is shared; of host memory for KV, " in plan.sums


def test_set_kv_is_kept_and_the_rest_is_the_others() -> None:
    kv = 10 * GIB
    _, plan = planned(two({"engine": {"kv_cache_memory_bytes": kv}}), node())
    large, small = plan.engines
    assert large.kv_bytes == kv
    assert (small.kv_bytes or 0) > 30 * GIB


def test_models_that_do_not_fit_on_one_gpu_are_refused_with_the_sums() -> None:
    three = {"a": QWEN3, "b": QWEN3, "c": QWEN3}
    asked: dict[str, Any] = {"models": {name: {} for name in three}}
    with pytest.raises(SettingsError) as caught:
        planned(load(asked), node(), shapes=three)
    (said,) = caught.value.problems
    assert said.startswith("gpus: the engines do not fit on one GPU of 80.0 GiB, of which they may")
    assert "1 x b decoder: 15.3 weights + 4.5 reserve + 5.6 KV of the longest sequence" in said
    assert "together 76.1 GiB; set engine.max_model_len=" in said
    # What is advised is accepted.
    longest = int(said.split("engine.max_model_len=")[1].split(",")[0])
    assert planned(load(asked | {"engine.max_model_len": longest}), node(), shapes=three)
    with pytest.raises(SettingsError, match=r"; serve fewer models on it, or use larger GPUs$"):
        planned(load(asked), node(gib=24), shapes=three)


def test_four_models_on_two_gpus_have_equal_parts() -> None:
    """Whichever two Ray puts on a GPU, both fit."""
    shapes = {"a": QWEN3, "b": QWEN3, "c": SMALL, "d": SMALL}
    settings, plan = planned(
        load({"models": {name: {} for name in shapes}}), node(2), shapes=shapes
    )
    assert [one.num_gpus for one in plan.engines] == [0.5] * 4
    assert short_of_gpus(settings, [node(2).offer]) == []
    # Of three, the largest has a GPU.
    shapes = {"c": SMALL, "a": QWEN3, "d": SMALL}
    _, plan = planned(load({"models": {name: {} for name in shapes}}), node(2), shapes=shapes)
    assert plan.engines[1].num_gpus == 1
    assert plan.engines[0].num_gpus + plan.engines[2].num_gpus <= 1


@pytest.mark.parametrize(
    ("settings", "gpus", "said"),
    [
        (two({"gpus": 1}, {"gpus": 1}), 1, "gpus: 1 for large + 1 for small = 2 are asked for"),
        (two({"gpus": 2}), 2, "gpus: 2 for large + 1 for small = 3 are asked for, and Ray has 2"),
        (two({"engine": {"tensor_parallel_size": 2}}), 2, "gpus: 4 for large + 1 for small = 5"),
        (
            two({"gpus": 1, "engine": {"tensor_parallel_size": 2}}),
            4,
            "models.large.gpus: 1 engines want",
        ),
    ],
)
def test_too_few_gpus_are_a_line(settings: Settings, gpus: int, said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        divided(settings, gpus, {})
    (line,) = caught.value.problems
    assert line.startswith(said)


def part(num_gpus: float, replicas: int = 1, **more: Any) -> dict[str, Any]:
    return {"prefillers": 0, "decoders": {"num_gpus": num_gpus, "replicas": replicas, **more}}


def test_given_parts_are_taken_where_ray_can_place_them_in_any_order() -> None:
    settings, plan = planned(two(part(0.7), part(0.3)), node())
    assert [one.num_gpus for one in plan.engines] == [0.7, 0.3]
    assert short_of_gpus(settings, [node().offer]) == []
    # Two of 0.4 may be on one GPU, and leave no room for the second of 0.6.
    (said,) = short_of_gpus(two(part(0.6, 2), part(0.4, 2)), [node(2).offer])
    assert "2 large decoders x 0.6 + 2 small decoders x 0.4 = 2 are asked for" in said
    assert said.endswith("ask for fewer engines, or have parts that are equal (num_gpus)")
    assert short_of_gpus(two(part(0.5, 2), part(0.5, 2)), [node(2).offer]) == []


def test_sm_slots_of_all_models_are_counted() -> None:
    tiers = {"x": {"sm_slots": 4}}
    require_slots(two(part(0.5, tier="x"), part(0.5, tier="x"), tiers=tiers))
    third = {"other": part(0.3, tier="x")}
    models = {"large": part(0.3, tier="x"), "small": part(0.3, tier="x"), **third}
    with pytest.raises(SettingsError, match=r"1 large decoder x 4 .* = 12 slots may be asked of"):
        require_slots(load({"tiers": tiers, "models": models}))


def test_engines_of_all_models_may_be_on_a_node() -> None:
    settings = divided(two(), 8, {})
    assert most_on_node(settings, 8) == Crowd(8, 8)
    assert most_on_node(settings.each["large"], 8) == Crowd(4, 4)


def test_host_memory_is_for_all_models() -> None:
    (settings, plan), (_, alone) = planned(two(), node(2)), planned(load({"model": "m"}), node(1),
                                                                  shapes={"m": QWEN3})  # fmt: skip
    # One and a half times the decoders' KV.
    sizes = [int(1.5 * (one.kv_bytes or 0) / GIB) for one in plan.engines]
    assert alone.size_gb == sizes[0]
    assert plan.size_gb == sum(sizes)
    assert {own.lmcache.size_gb for own in settings.each.values()} == {plan.size_gb}
    assert settings.lmcache.size_gb == plan.size_gb
    # At most half of what is free.
    _, plan = planned(two(), node(2, free=64))
    assert plan.size_gb == 32
    # What it keeps is said of the model whose tokens are larger.
    assert plan.kept_tokens == int(0.72 * 32 * GIB / 147_456)
    _, plan = planned(two(**{"lmcache.size_gb": 40}), node(2))
    assert plan.size_gb == 40


def test_notes_name_their_model() -> None:
    shapes = {"large": QWEN3, "small": shape_of(QWEN3_06B)}
    _, plan = planned(two({"gpus": 1}, {"gpus": 1}), node(3), shapes=shapes)
    assert plan.notes[0].startswith("small: the weights' size is computed from config.json")
    assert plan.notes[1:] == ("1 of 3 GPUs have no engine",)
    assert plan.lines()[0].startswith("1 x large decoder, 1 GPU a worker")


def test_chunks_of_several_sizes_are_refused() -> None:
    with pytest.raises(SettingsError) as caught:
        require_one_chunk(two({"engine": {"block_size": 1024}}), gpu=True)
    assert str(caught.value).endswith(
        "1024 tokens for large, 256 tokens for small; set engine.block_size=1024 for all"
    )
    same = two(**{"engine.block_size": 1024})
    require_one_chunk(same, gpu=True)
    assert chunk_tokens(same, gpu=True) == 1024


def test_models_on_cpus_are_counted_together() -> None:
    large, small = two(ALONE, {"prefillers": 0}, **{"engine.max_model_len": 4096}).each.values()
    memory = HostMemory(24 * GIB, 20 * GIB)
    _, both = cpu_plan(small, SMALL, memory, cpu_plan(large, QWEN3, memory)[1])
    assert both.terms == (
        "1 large decoders x (15.3 weights + 1.0 KV space)",
        "2 small decoders x (1.4 weights + 1.0 KV space)",
    )
    assert both.taken_bytes == QWEN3.weights_bytes + 2 * SMALL.weights_bytes + 3 * GIB
    memory = HostMemory(23 * GIB, 20 * GIB)
    _, first = cpu_plan(large, QWEN3, memory)
    with pytest.raises(SettingsError, match=r"1 large decoders .* \+ 2 small .* = 23\.1 GiB"):
        cpu_plan(small, SMALL, memory, first)
