"""Works out a model's memory from its ``config.json``: weights, KV per token and a step's rest.
Pure.

The configuration is best given with its class's defaults (`deployments.model_files`). Layers are
counted as vLLM keeps them at most: one with a sliding window as if it kept every token. A recurrent
layer (Mamba, linear attention) keeps a state, whatever the number of tokens.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hetero.vision_tower import Tower, TowerUnknown, tower_of

_DTYPE_BYTES = {
    "float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
# Bytes of a value by vLLM's `kv_cache_dtype`; others keep KV as the model computes it.
_KV_BYTES = {
    "float32": 4.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5, "nvfp4": 0.5,
    # Of 576 values of latent attention, 512 have 8 bits, and scales; 64 have 16 bits.
    "fp8_ds_mla": 656 / 576,
}  # fmt: skip
# Names that configurations use for the same value.
_KV_HEADS = (
    "num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num",
    "num_attention_groups",
)  # fmt: skip
_HEAD_VALUES = ("head_dim", "attention_head_dim", "hidden_size_per_head")
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length",
            "max_sequence_length")  # fmt: skip
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_EXPERT_WIDTHS = ("moe_intermediate_size", "expert_ffn_hidden_size")
# Every n-th layer has experts; the others are dense.
_EXPERT_PERIODS = ("expert_layer_period", "decoder_sparse_step", "interleave_moe_layer_step")
# Kinds of layers with neither attention nor a state.
_DENSE = ("mlp", "moe")
# Models with latent attention for which vLLM keeps full K and V.
_NOT_LATENT = ("minicpm3",)
# Weights of a layer with a state instead of attention, in squares of the hidden size. Mamba 1 and 2
# and gated delta nets have 6 to 8.
_STATE_WEIGHTS = 6.5
# Values that `shape_of` reads, by all their names.
READ = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size",
    "num_experts_per_tok", "tie_word_embeddings", "layers_block_type", "layer_types",
    *_KV_HEADS, *_HEAD_VALUES, *_LENGTHS, *_EXPERTS,
)  # fmt: skip


class ModelUnknown(ValueError):
    """The configuration lacks a value; the message names it."""


@dataclass(frozen=True, slots=True)
class KvLayers:
    """Layers that keep equally much KV: heads of K, and values of K and V together."""

    layers: int
    heads: int
    head_values: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The properties of a model that decide its memory."""

    weights_bytes: int
    estimated: bool  # Whether the weights were computed from the configuration.
    kv: tuple[KvLayers, ...]
    latent: bool  # Whether attention is latent (MLA), so that workers do not divide its KV.
    value_bytes: int
    hidden: int
    step_width: int  # The most values of a token within a layer at a time.
    vocabulary: int
    max_model_len: int | None
    # Layers that keep a state (Mamba, linear attention), and bytes of one state; 0: not known.
    states: tuple[int, int] = (0, 0)
    index_token_bytes: int = 0  # Sparse attention's keys, in 8 bits with scales.
    windowed: bool = False  # Whether a long sequence may take less KV than is counted.
    quantised: bool = False
    tower: Tower | None = None  # Counted in the weights.
    tower_unknown: str = ""  # Why an encoder is not counted; empty: it is, or there is none.

    @property
    def recurrent(self) -> bool:
        return self.states[0] > 0

    @property
    def sees(self) -> bool:
        """Whether it has an encoder of images, or of other media."""
        return self.tower is not None or bool(self.tower_unknown)

    @property
    def tower_bytes(self) -> int:
        """Bytes of the weights that are the tower's."""
        if self.tower is None:
            return 0
        return min(self.weights_bytes, self.tower.parameters * self.value_bytes)

    def keeping(self, tower_layers: int | None) -> "ModelShape":
        """Return the model with this many layers of its tower on the GPU; None: all of them."""
        return self if self.tower is None else replace(self, tower=self.tower.keeping(tower_layers))

    @property
    def shares_kv(self) -> bool:
        """Whether all workers of a stage keep the same KV, so that LMCache has it once."""
        # States beside latent attention differ by worker.
        return self.latent and not self.recurrent

    def kv_token_bytes(self, tensor_parallel: int = 1, kv_cache_dtype: str = "auto") -> float:
        each = float(self.value_bytes)
        for name, size in _KV_BYTES.items():
            if kv_cache_dtype.startswith(name):
                each = size
        values = kv_token_values(self.kv, 1 if self.latent else tensor_parallel)
        return values * each + self.index_token_bytes


def kv_token_values(kv: Sequence[KvLayers], tensor_parallel: int = 1) -> float:
    """Return the values that a token takes on each worker; workers divide the heads."""
    # With more workers than heads, several keep the same head.
    return sum(one.layers * max(1.0, one.heads / tensor_parallel) * one.head_values for one in kv)


def shape_of(
    config: Mapping[str, Any],
    weights_bytes: int | None = None,
    dtype: str = "auto",
    processor: Mapping[str, Any] | None = None,
    state_dtype: str = "auto",
) -> ModelShape:
    """Return a model's shape from its ``config.json``.

    Args:
        weights_bytes: size of its weight files; None: computed from the configuration.
        dtype, state_dtype: vLLM's engine arguments ``dtype`` and ``mamba_ssm_cache_dtype``.
        processor: values of its ``preprocessor_config.json``; None: it has none.

    Raises:
        ModelUnknown: a value is missing.
    """
    own = _of_text(config)
    layers, hidden = _number(own, "num_hidden_layers"), _number(own, "hidden_size")
    kv, latent = kv_of(own), _is_latent(own)
    if not kv:
        raise ModelUnknown("its layers keep states alone, and no KV that could be handed over")
    heads = _number(own, "num_attention_heads")
    kv_heads = _kv_heads(own, heads)
    head_values = max(one.head_values for one in kv) // 2
    if latent:
        head_values = _head_values(own, hidden, heads)
    stored = str(own.get("dtype") or own.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    stored_bytes = _DTYPE_BYTES.get(stored, 2)
    # By default vLLM computes 32-bit models in 16 bits.
    value_bytes = _DTYPE_BYTES.get(dtype, min(stored_bytes, 2) if dtype == "auto" else 2)
    tower, tower_unknown = None, ""
    try:
        tower = tower_of(config, hidden, processor)
    except TowerUnknown as error:
        tower_unknown = str(error)
    estimated = weights_bytes is None
    if weights_bytes is None:
        weights_bytes = round(_parameters(own, layers, hidden, heads, kv_heads, head_values)
                              * _parameter_bytes(own, value_bytes))  # fmt: skip
        # Quantised models keep their towers as they are.
        weights_bytes += 0 if tower is None else tower.parameters * value_bytes
    elif not own.get("quantization_config"):
        weights_bytes = weights_bytes * value_bytes // stored_bytes
    return ModelShape(
        weights_bytes=weights_bytes,
        estimated=estimated,
        kv=kv,
        latent=latent,
        value_bytes=value_bytes,
        hidden=hidden,
        step_width=_step_width(own, hidden, heads, kv_heads, head_values),
        vocabulary=_number(own, "vocab_size"),
        max_model_len=_first(own, _LENGTHS),
        states=states_of(own, value_bytes, state_dtype),
        index_token_bytes=layers * int(own.get("index_head_dim") or 0) * 132 // 128,
        windowed=_is_windowed(own),
        quantised=bool(own.get("quantization_config")),
        tower=tower,
        tower_unknown=tower_unknown,
    )


def kv_of(config: Mapping[str, Any]) -> tuple[KvLayers, ...]:
    """Return what a model's layers keep for each token; raises `ModelUnknown`."""
    own = _of_text(config)
    attends = _attends(own)
    # The last `num_kv_shared_layers` layers read the KV of earlier ones.
    shared = int(own.get("num_kv_shared_layers") or 0)
    kept = [number for number, does in enumerate(attends[: len(attends) - shared]) if does]
    if not kept:
        return ()
    if _is_latent(own):
        values = int(own["kv_lora_rank"]) + int(own.get("qk_rope_head_dim") or 0)
        return (KvLayers(len(kept), 1, values),)
    counts: Counter[tuple[int, int]] = Counter()
    for number in kept:
        layer = _layer(own, number)
        hidden, heads = _number(layer, "hidden_size"), _number(layer, "num_attention_heads")
        counts[_kv_heads(layer, heads), _head_values(layer, hidden, heads)] += 1
    return tuple(KvLayers(count, heads, 2 * values) for (heads, values), count in counts.items())


def _of_text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language model's values, which a multimodal model nests in ``text_config``."""
    return {**config, **(config.get("text_config") or {})}


def _first(config: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((config[name] for name in names if config.get(name)), None)


def _number(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value < 1:
        raise ModelUnknown(f"its config.json has no {name}")
    return value


def _is_latent(config: Mapping[str, Any]) -> bool:
    return bool(config.get("kv_lora_rank")) and config.get("model_type") not in _NOT_LATENT


def _kv_heads(config: Mapping[str, Any], heads: int) -> int:
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    inner = config.get("attn_config")
    if isinstance(inner, Mapping) and inner.get("kv_n_heads"):
        return int(inner["kv_n_heads"])
    return int(_first(config, _KV_HEADS) or heads)


def _head_values(config: Mapping[str, Any], hidden: int, heads: int) -> int:
    return int(_first(config, _HEAD_VALUES) or hidden // heads)


def _layer(config: Mapping[str, Any], number: int) -> Mapping[str, Any]:
    """Return one layer's configuration, where heads differ (Gemma 4, Nemotron's puzzles)."""
    differing = config.get("per_layer_config")
    if isinstance(differing, Mapping):
        found = [one for name, one in differing.items() if int(name) == number]
        return {**config, **found[0]} if found else config
    blocks = config.get("block_configs")
    if blocks:
        group = blocks[number]["attention"].get("n_heads_in_group")
        heads = _number(config, "num_attention_heads")
        return {**config, "num_key_value_heads": heads // group} if group else config
    kinds = config.get("layer_types") or ()
    if config.get("global_head_dim") and number < len(kinds) and "full" in kinds[number]:
        full = {"head_dim": config["global_head_dim"]}
        if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads"):
            full["num_key_value_heads"] = config["num_global_key_value_heads"]
        return {**config, **full}
    return config


def _kinds(config: Mapping[str, Any]) -> list[str] | None:
    """Return each layer's kind; None: all have attention."""
    layers = range(_number(config, "num_hidden_layers"))
    kinds = config.get("layers_block_type") or config.get("layer_types")
    if kinds:
        return [str(kind) for kind in kinds[: len(layers)]]
    pattern = config.get("hybrid_override_pattern")
    if pattern:
        names = {"*": "attention", "M": "mamba", "-": "mlp", "E": "moe"}
        return [names.get(letter, letter) for letter in pattern]
    attends: list[bool] | None = None
    if config.get("attn_type_list"):
        attends = [kind == 1 for kind in config["attn_type_list"]]
    elif config.get("attn_layer_indices") is not None:
        attends = [layer in config["attn_layer_indices"] for layer in layers]
    elif config.get("attn_layer_period"):
        first = config.get("attn_layer_offset") or 0
        attends = [layer % config["attn_layer_period"] == first for layer in layers]
    elif config.get("full_attention_interval"):
        attends = [(layer + 1) % config["full_attention_interval"] == 0 for layer in layers]
    elif (config.get("linear_attn_config") or {}).get("full_attn_layers"):
        # These layers are numbered from 1.
        full = config["linear_attn_config"]["full_attn_layers"]
        attends = [layer + 1 in full for layer in layers]
    elif config.get("block_configs"):
        blocks = config["block_configs"]
        return ["mlp" if one["attention"].get("no_op") else "attention" for one in blocks]
    if attends is None:
        return None
    return ["attention" if does else "linear_attention" for does in attends]


def _attends(config: Mapping[str, Any]) -> list[bool]:
    """Return whether each layer keeps something for every token; a hybrid layer does."""
    kinds = _kinds(config)
    if kinds is None:
        return [True] * _number(config, "num_hidden_layers")
    return [kind == "hybrid" or ("attention" in kind and "linear" not in kind) for kind in kinds]


def states_of(
    config: Mapping[str, Any], value_bytes: int, state_dtype: str = "auto"
) -> tuple[int, int]:
    """Return how many layers keep a state, and the bytes of one of those, on all workers together.

    The size is 0 if it is not known. Otherwise it is that of vLLM's ``MambaStateShapeCalculator``:
    the last inputs of a convolution, and the recurrent state.
    """
    own = _of_text(config)
    kinds = _kinds(own)
    if kinds is None:
        # Attention and a state in each layer, as in Falcon H1.
        hybrid = any(name.startswith("mamba_") for name in own)
        kinds = ["hybrid"] * _number(own, "num_hidden_layers") if hybrid else []
    layers = sum(
        kind == "hybrid" or "linear" in kind or ("attention" not in kind and kind not in _DENSE)
        for kind in kinds
    )
    return layers, _state_bytes(own, value_bytes, state_dtype) if layers else 0


def _state_bytes(config: Mapping[str, Any], value_bytes: int, state_dtype: str) -> int:
    def of(*names: str) -> int:
        found = _first(config, names)
        return found if isinstance(found, int) else 0

    kind = str(config.get("model_type"))
    # What vLLM keeps the state as, where the argument does not say.
    kept_as = ""
    if kind.startswith(("qwen3_5", "qwen4")):
        kept_as = str(config.get("mamba_ssm_dtype") or "")
    elif kind == "nemotron_h":
        kept_as = str(config.get("mamba_ssm_cache_dtype") or "float32")
    delta = config.get("linear_attn_config") or {}
    if of("linear_num_value_heads"):  # Gated delta nets.
        keys = of("linear_num_key_heads") * of("linear_key_head_dim")
        values = of("linear_num_value_heads") * of("linear_value_head_dim")
        state, channels = values * of("linear_key_head_dim"), values + 2 * keys
        kernel = of("linear_conv_kernel_dim")
    elif delta.get("num_heads"):  # Kimi's.
        values = int(delta["num_heads"]) * int(delta["head_dim"])
        state, channels = values * int(delta["head_dim"]), 3 * values
        kernel, kept_as = int(delta["short_conv_kernel_size"]), "float32"
    else:
        size = of("ssm_state_size", "mamba_d_state")
        heads = of("mamba_num_heads", "mamba_n_heads", "n_mamba_heads")
        inner = heads * of("mamba_head_dim", "mamba_d_head", "mamba_headdim")
        inner = inner or of("mamba_expand", "expand") * of("hidden_size")
        # Mamba 1 has neither heads nor groups.
        groups = of("n_groups", "mamba_n_groups", "mamba_ngroups") if heads else 0
        state, channels = inner * size, inner + 2 * groups * size
        kernel = of("conv_kernel", "mamba_d_conv")
    if not (state and kernel):
        return 0
    inputs_bytes = channels * (kernel - 1) * value_bytes
    kept_as = kept_as if state_dtype == "auto" else state_dtype
    return inputs_bytes + state * _DTYPE_BYTES.get(kept_as, value_bytes)


def _is_windowed(config: Mapping[str, Any]) -> bool:
    window = config.get("sliding_window") and config.get("use_sliding_window", True)
    kinds = config.get("layer_types") or ()
    return bool(window or config.get("attention_chunk_size")) or any(
        "sliding" in kind or "chunked" in kind for kind in kinds
    )


def _experts(config: Mapping[str, Any]) -> int:
    return int(_first(config, _EXPERTS) or 0)


def _expert_width(config: Mapping[str, Any]) -> int:
    return int(_first(config, _EXPERT_WIDTHS) or _width(config, 0))


def _width(config: Mapping[str, Any], otherwise: int) -> int:
    said = config.get("intermediate_size") or otherwise
    return max(said) if isinstance(said, list | tuple) else int(said)


def _step_width(
    config: Mapping[str, Any], hidden: int, heads: int, kv_heads: int, head_values: int
) -> int:
    """Return the most values of a token that exist at a time within a layer.

    Around a feed-forward part: input, output, residual, both gates and their product, for each
    expert that a token goes to. Around attention: queries, keys, values and output.
    """
    attention = (2 * heads + 2 * kv_heads) * head_values + 2 * hidden
    if _experts(config):
        chosen = config.get("num_experts_per_tok") or 1
        return max(attention, 2 * hidden + chosen * (hidden + 3 * _expert_width(config)))
    return max(attention, 3 * hidden + 3 * _width(config, 4 * hidden))


def _parameters(
    config: Mapping[str, Any], layers: int, hidden: int, heads: int, kv_heads: int, head_values: int
) -> int:
    kinds = _kinds(config) or ["attention"] * layers
    attend = sum(_attends(config))
    # If attention, states and feed-forward parts alternate, each layer is only one of them.
    apart = any(kind in _DENSE for kind in kinds)
    inner_layers = sum(kind in _DENSE for kind in kinds) if apart else layers
    states = len(kinds) - attend - (inner_layers if apart else 0)
    attention = 2 * hidden * (heads + kv_heads) * head_values * attend
    attention += round(_STATE_WEIGHTS * hidden * hidden) * states
    dense = 3 * hidden * _width(config, 4 * hidden)
    experts = _experts(config)
    if experts:
        shared = config.get("n_shared_experts") or 0
        each = 3 * hidden * _expert_width(config)
        first = config.get("first_k_dense_replace") or 0
        with_experts = (inner_layers - first) // int(_first(config, _EXPERT_PERIODS) or 1)
        inner = (inner_layers - with_experts) * dense
        inner += with_experts * ((experts + shared) * each + hidden * experts)
    else:
        inner = inner_layers * dense
    tables = 1 if config.get("tie_word_embeddings") else 2
    return attention + inner + tables * _number(config, "vocab_size") * hidden


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
    # Scales and unquantised weights, mainly embeddings, add some 15 %.
    return 1.15 * bits / 8
