"""What models take of memory, against what is known of them."""

import pytest

from hetero.model_shape import ModelUnknown, shape_of
from tests.unit.hetero.shapes import DEEPSEEK_LITE, QWEN3_8B, QWEN3_30B_A3B


def test_a_dense_model() -> None:
    shape = shape_of(QWEN3_8B)
    # 36 layers of 8 heads of K and V of 128 values of 2 bytes: 144 KiB.
    assert shape.kv_token_bytes() == 36 * 8 * 2 * 128 * 2 == 144 * 1024
    # 8,190,735,360 parameters by its model card; norms are left out.
    assert shape.weights_bytes == pytest.approx(2 * 8_190_735_360, rel=1e-4)
    assert shape.estimated
    assert shape.max_model_len == 40960


def test_experts_are_counted_all_and_run_a_few() -> None:
    shape = shape_of(QWEN3_30B_A3B)
    assert shape.weights_bytes == pytest.approx(2 * 30.5e9, rel=0.01)
    assert shape.kv_token_bytes() == 48 * 4 * 2 * 128 * 2
    assert shape.step_width == 2 * 2048 + 8 * (2048 + 3 * 768)


def test_latent_attention_keeps_one_vector_on_every_worker() -> None:
    shape = shape_of(DEEPSEEK_LITE)
    assert shape.kv_token_bytes() == shape.kv_token_bytes(4) == 27 * (512 + 64) * 2
    assert shape.weights_bytes == pytest.approx(2 * 15.7e9, rel=0.03)


def test_heads_are_divided_among_workers_as_far_as_they_go() -> None:
    shape = shape_of(QWEN3_8B)
    assert shape.kv_token_bytes(2) == shape.kv_token_bytes() / 2
    assert shape.kv_token_bytes(16) == shape.kv_token_bytes() / 8


def test_kv_may_be_kept_in_fewer_bits() -> None:
    shape = shape_of(QWEN3_8B)
    assert shape.kv_token_bytes(1, "fp8_e4m3") == shape.kv_token_bytes() / 2


def test_layers_without_kv_are_left_out() -> None:
    kinds = ["linear_attention"] * 27 + ["full_attention"] * 9
    assert shape_of(QWEN3_8B | {"layer_types": kinds}).kv_layers == 9
    windows = ["sliding_attention"] * 18 + ["full_attention"] * 18
    assert shape_of(QWEN3_8B | {"layer_types": windows}).kv_layers == 36
    assert shape_of(QWEN3_8B | {"full_attention_interval": 4}).kv_layers == 9


def test_a_state_in_the_place_of_tokens_is_seen() -> None:
    for hybrid in (
        {"layer_types": ["linear_attention", "full_attention"] * 18},
        {"layer_types": ["mamba", "attention"] * 18},
        {"full_attention_interval": 4},
        {"hybrid_override_pattern": "M-M*"},
        {"mamba_d_state": 128},
    ):
        assert shape_of(QWEN3_8B | hybrid).recurrent
    windows = {"layer_types": ["sliding_attention", "full_attention"] * 18}
    assert not shape_of(QWEN3_8B | windows).recurrent
    assert not shape_of(QWEN3_8B).recurrent


def test_weights_are_loaded_as_the_engine_computes() -> None:
    """Files with 32 bits take half on the GPU; those of a quantised model what they are."""
    config = QWEN3_8B | {"torch_dtype": "float32"}
    assert shape_of(config, 32_000).weights_bytes == 16_000
    assert shape_of(config, 32_000, "float32").weights_bytes == 32_000
    assert shape_of(QWEN3_8B, 16_000).weights_bytes == 16_000
    awq = QWEN3_8B | {"quantization_config": {"quant_method": "awq", "bits": 4}}
    assert shape_of(awq, 6_000).weights_bytes == 6_000
    assert shape_of(awq).weights_bytes == pytest.approx(shape_of(QWEN3_8B).weights_bytes * 0.2875)


def test_what_surrounds_a_language_model_is_looked_into() -> None:
    assert shape_of({"text_config": QWEN3_8B}).kv_layers == 36


@pytest.mark.parametrize("missing", ["num_hidden_layers", "hidden_size", "vocab_size"])
def test_what_is_missing_is_named(missing: str) -> None:
    config = {name: value for name, value in QWEN3_8B.items() if name != missing}
    with pytest.raises(ModelUnknown, match=missing):
        shape_of(config)
