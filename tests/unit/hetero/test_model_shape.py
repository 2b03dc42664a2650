"""What models take of memory, against what is known of them."""

from collections.abc import Mapping
from typing import Any

import pytest

from hetero.model_shape import KvLayers, ModelUnknown, shape_of
from tests.unit.hetero.shapes import DEEPSEEK_LITE, JAMBA, NEMOTRON_H_8B, QWEN3_8B, QWEN3_30B_A3B


def layers_with_kv(config: Mapping[str, Any]) -> int:
    return sum(one.layers for one in shape_of(config).kv)


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
    assert shape_of(DEEPSEEK_LITE).kv_token_bytes(1, "fp8_ds_mla") == pytest.approx(27 * 656)
    sparse = shape_of(DEEPSEEK_LITE | {"index_head_dim": 128})
    assert sparse.kv_token_bytes() == 27 * (576 * 2 + 132)


def test_layers_without_kv_are_left_out() -> None:
    kinds = ["linear_attention"] * 27 + ["full_attention"] * 9
    assert layers_with_kv(QWEN3_8B | {"layer_types": kinds}) == 9
    windows = ["sliding_attention"] * 18 + ["full_attention"] * 18
    assert layers_with_kv(QWEN3_8B | {"layer_types": windows}) == 36
    assert layers_with_kv(QWEN3_8B | {"full_attention_interval": 4}) == 9


def test_layers_with_attention_alone_are_counted_however_they_are_said() -> None:
    assert shape_of(NEMOTRON_H_8B).kv_token_bytes() == 4 * 8 * 256 * 2
    assert shape_of(JAMBA).kv_token_bytes() == 4 * 8 * 256 * 2
    for said, layers in (
        ({"layers_block_type": ["mamba", "attention"] * 18}, 18),
        # Attention and a state in one layer, as of Falcon H1 and Zamba 2.
        ({"layers_block_type": ["hybrid"] * 36}, 36),
        ({"layers_block_type": ["mamba"] * 30 + ["hybrid"] * 6}, 6),
        ({"attn_type_list": [0] * 31 + [1] * 5}, 5),
        ({"attn_layer_indices": [9, 18, 27]}, 3),
        ({"linear_attn_config": {"full_attn_layers": [4, 8, 36]}}, 3),
        ({"layer_types": ["conv"] * 20 + ["full_attention"] * 16}, 16),
        ({"num_kv_shared_layers": 15}, 21),
        ({"block_configs": [{"attention": {"no_op": True}}] * 6
          + [{"attention": {"no_op": False, "n_heads_in_group": 4}}] * 30}, 30),
    ):  # fmt: skip
        assert layers_with_kv(QWEN3_8B | said) == layers, said
    with pytest.raises(ModelUnknown, match="states alone"):
        shape_of(QWEN3_8B | {"layer_types": ["mamba"] * 36})


def test_layers_that_differ_in_heads_are_counted_each() -> None:
    """As Gemma 4's: larger heads where attention is full, and fewer of them."""
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    said = {"layer_types": kinds * 6, "global_head_dim": 512}
    assert shape_of(QWEN3_8B | said).kv == (KvLayers(30, 8, 256), KvLayers(6, 8, 1024))
    said |= {"attention_k_eq_v": True, "num_global_key_value_heads": 2}
    shape = shape_of(QWEN3_8B | said)
    assert shape.kv_token_bytes() == (30 * 8 * 256 + 6 * 2 * 1024) * 2
    assert shape.kv_token_bytes(4) == (30 * 2 * 256 + 6 * 1 * 1024) * 2
    each = {"per_layer_config": {"05": {"head_dim": 64}, "11": {"num_key_value_heads": 4}}}
    found = set(shape_of(QWEN3_8B | each).kv)
    assert found == {KvLayers(34, 8, 256), KvLayers(1, 8, 128), KvLayers(1, 4, 256)}


def test_a_latent_vector_that_is_not_kept_as_such_is_heads() -> None:
    mini = QWEN3_8B | {"kv_lora_rank": 256, "qk_rope_head_dim": 32, "model_type": "minicpm3"}
    assert shape_of(mini).kv_token_bytes() == shape_of(QWEN3_8B).kv_token_bytes()


def test_a_state_in_the_place_of_tokens_is_seen() -> None:
    for hybrid in (
        {"layer_types": ["linear_attention", "full_attention"] * 18},
        {"layer_types": ["mamba", "attention"] * 18},
        {"full_attention_interval": 4},
        {"hybrid_override_pattern": "M-M*" * 9},
        {"mamba_d_state": 128},
        {"layers_block_type": ["hybrid"] * 36},
        {"attn_layer_period": 8},
    ):
        assert shape_of(QWEN3_8B | hybrid).recurrent
    # Granite 4 is of one class, with Mamba and without.
    plain = {"layer_types": ["attention"] * 36, "mamba_d_state": 128}
    assert not shape_of(QWEN3_8B | plain).recurrent
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


@pytest.mark.parametrize("missing", ["num_hidden_layers", "hidden_size", "vocab_size"])
def test_what_is_missing_is_named(missing: str) -> None:
    config = {name: value for name, value in QWEN3_8B.items() if name != missing}
    with pytest.raises(ModelUnknown, match=missing):
        shape_of(config)
