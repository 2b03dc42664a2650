"""What a model takes of a GPU's memory, by its ``config.json``: weights, KV a token, a step's rest.

Pure: the configuration comes in as a mapping, as Hugging Face writes it. Figures are of a
transformer with attention of one of the usual kinds (multi-head, grouped, latent) and dense or
mixture-of-experts layers. What differs among layers is counted as vLLM keeps it at most: a layer
with a sliding window as if it kept every token, one with a recurrent state as none.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_DTYPE_BYTES = {
    "float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
# vLLM's `kv_cache_dtype`; those that are not here are kept as the model computes.
_KV_BYTES = {"float32": 4.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5, "nvfp4": 0.5}


class ModelUnknown(ValueError):
    """The configuration does not say what is asked of it; the message names what is missing."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a model decides how much memory it takes.

    Attributes:
        weights_bytes: all parameters, as they are loaded.
        estimated: whether that was computed from the configuration, and not seen in files.
        kv_layers: layers that keep something of each token.
        kv_heads: heads of K, and as many of V; 1 with latent attention.
        kv_head_values: values of a head and token, K and V together.
        latent: whether attention is latent (MLA): what it keeps is not divided among workers.
        value_bytes: bytes of a computed value (2: 16 bits).
        hidden, step_width, vocabulary: values of a token between layers; at most within one; and
            at the end.
        max_model_len: tokens of the longest sequence; None if it is not said.
        recurrent: whether layers keep a state (Mamba, linear attention) in the place of tokens.
        windowed: whether layers look back no further than a window, so that a long sequence takes
            less KV than is counted.
    """

    weights_bytes: int
    estimated: bool
    kv_layers: int
    kv_heads: int
    kv_head_values: int
    latent: bool
    value_bytes: int
    hidden: int
    step_width: int
    vocabulary: int
    max_model_len: int | None
    recurrent: bool = False
    windowed: bool = False

    def kv_token_bytes(self, tensor_parallel: int = 1, kv_cache_dtype: str = "auto") -> float:
        """Bytes of KV that a token takes on each of so many workers."""
        each = float(self.value_bytes)
        for name, size in _KV_BYTES.items():
            if kv_cache_dtype.startswith(name):
                each = size
        # With more workers than heads, several keep the same.
        heads = self.kv_heads if self.latent else max(1.0, self.kv_heads / tensor_parallel)
        return self.kv_layers * heads * self.kv_head_values * each


def shape_of(
    config: Mapping[str, Any], weights_bytes: int | None = None, dtype: str = "auto"
) -> ModelShape:
    """A model's shape.

    Args:
        config: its ``config.json``.
        weights_bytes: size of its weights' files; None: computed from the configuration.
        dtype: vLLM's engine argument.

    Raises:
        ModelUnknown: a value is missing.
    """
    # What a multimodal model wraps around its language model.
    own = {**config, **(config.get("text_config") or {})}
    layers, hidden = _number(own, "num_hidden_layers"), _number(own, "hidden_size")
    heads = _number(own, "num_attention_heads")
    head_values = own.get("head_dim") or hidden // heads
    latent_values = own.get("kv_lora_rank")
    kv_heads = own.get("num_key_value_heads") or heads
    stored = str(own.get("dtype") or own.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    stored_bytes = _DTYPE_BYTES.get(stored, 2)
    # vLLM computes in 16 bits what was stored in 32, unless it is told otherwise.
    value_bytes = _DTYPE_BYTES.get(dtype, min(stored_bytes, 2) if dtype == "auto" else 2)
    estimated = weights_bytes is None
    if weights_bytes is None:
        weights_bytes = round(_parameters(own, layers, hidden, heads, kv_heads, head_values)
                              * _parameter_bytes(own, value_bytes))  # fmt: skip
    elif not own.get("quantization_config"):
        weights_bytes = weights_bytes * value_bytes // stored_bytes
    return ModelShape(
        weights_bytes=weights_bytes,
        estimated=estimated,
        kv_layers=_kv_layers(own, layers),
        kv_heads=1 if latent_values else kv_heads,
        kv_head_values=(
            latent_values + own.get("qk_rope_head_dim", 0) if latent_values else 2 * head_values
        ),
        latent=bool(latent_values),
        value_bytes=value_bytes,
        hidden=hidden,
        step_width=_step_width(own, hidden, heads, kv_heads, head_values),
        vocabulary=_number(own, "vocab_size"),
        max_model_len=own.get("max_position_embeddings"),
        recurrent=_is_recurrent(own),
        windowed=_is_windowed(own),
    )


def _number(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value < 1:
        raise ModelUnknown(f"its config.json has no {name}")
    return value


def _kv_layers(config: Mapping[str, Any], layers: int) -> int:
    kinds = config.get("layer_types")
    if kinds:
        return sum("attention" in kind and "linear" not in kind for kind in kinds)
    interval = config.get("full_attention_interval")
    return layers // interval if interval else layers


def _is_recurrent(config: Mapping[str, Any]) -> bool:
    kinds = config.get("layer_types") or ()
    return (
        any("linear" in kind or "attention" not in kind for kind in kinds)
        or bool(config.get("full_attention_interval") or config.get("hybrid_override_pattern"))
        or any(name.startswith("mamba_") for name in config)
    )


def _is_windowed(config: Mapping[str, Any]) -> bool:
    window = config.get("sliding_window") and config.get("use_sliding_window", True)
    kinds = config.get("layer_types") or ()
    return bool(window or config.get("attention_chunk_size")) or any(
        "sliding" in kind or "chunked" in kind for kind in kinds
    )


def _experts(config: Mapping[str, Any]) -> int:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((config[name] for name in names if config.get(name)), 0)


def _expert_width(config: Mapping[str, Any]) -> int:
    return int(config.get("moe_intermediate_size") or config.get("intermediate_size") or 0)


def _step_width(
    config: Mapping[str, Any], hidden: int, heads: int, kv_heads: int, head_values: int
) -> int:
    """Values of a token that are there at a time within a layer, at most.

    Around a feed-forward part: its input and output, the residual, both gates and their product;
    with experts those of each that a token goes to. Around attention: queries, keys, values and
    output.
    """
    attention = (2 * heads + 2 * kv_heads) * head_values + 2 * hidden
    if _experts(config):
        chosen = config.get("num_experts_per_tok") or 1
        return max(attention, 2 * hidden + chosen * (hidden + 3 * _expert_width(config)))
    return max(attention, 3 * hidden + 3 * int(config.get("intermediate_size") or 4 * hidden))


def _parameters(
    config: Mapping[str, Any], layers: int, hidden: int, heads: int, kv_heads: int, head_values: int
) -> int:
    attention = 2 * hidden * (heads + kv_heads) * head_values
    dense = 3 * hidden * int(config.get("intermediate_size") or 4 * hidden)
    experts = _experts(config)
    if experts:
        shared = config.get("n_shared_experts") or 0
        each = 3 * hidden * _expert_width(config)
        first = config.get("first_k_dense_replace") or 0
        inner = first * dense + (layers - first) * ((experts + shared) * each + hidden * experts)
    else:
        inner = layers * dense
    tables = 1 if config.get("tie_word_embeddings") else 2
    return layers * attention + inner + tables * _number(config, "vocab_size") * hidden


def _parameter_bytes(config: Mapping[str, Any], value_bytes: int) -> float:
    quantised = config.get("quantization_config")
    if not quantised:
        return float(value_bytes)
    bits: float | None = quantised.get("bits") or quantised.get("weight_bits")
    method = str(quantised.get("quant_method", ""))
    if bits is None:
        bits = 8 if "fp8" in method or "int8" in method else 4 if "4" in method else None
    if bits is None:
        raise ModelUnknown(f"how many bits its quantisation {method!r} takes is not said")
    # Scales and what stays unquantised, embeddings above all.
    return 1.15 * bits / 8
