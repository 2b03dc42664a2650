"""Models whose layers are of several kinds, by vLLM's own sizes of their blocks."""

import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    FalconH1Config,
    GraniteMoeHybridConfig,
    JambaConfig,
    NemotronHConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models import config as vllms_config
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, MambaSpec

from deployments.engine.kv_layers import require_whole_blocks
from deployments.model_config import values
from hetero.gpu_plan import _STATE_BLOCK_TOKENS
from hetero.model_shape import states_of


def _config(device: str = "cuda") -> Any:
    return SimpleNamespace(
        device_config=SimpleNamespace(device_type=device),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        cache_config=SimpleNamespace(block_size=16),
    )


def _groups(*blocks: int) -> Any:
    """As vLLM groups layers: full attention, and Mamba's, with blocks of so many tokens."""
    specs: list[Any] = [
        FullAttentionSpec(block_size=blocks[0], num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    ]
    specs += [
        MambaSpec(
            block_size=block, shapes=((4, 4),), dtypes=(torch.float32,), mamba_cache_mode="align"
        )
        for block in blocks[1:]
    ]
    return SimpleNamespace(
        kv_cache_groups=[KVCacheGroupSpec([f"layer.{n}"], spec) for n, spec in enumerate(specs)]
    )


@pytest.mark.parametrize(
    ("blocks", "chunk"), [((16,), 256), ((544, 544), 544), ((1024, 1024), 2048)]
)
def test_a_chunk_of_whole_blocks_is_taken(blocks: tuple[int, ...], chunk: int) -> None:
    require_whole_blocks(_config(), _groups(*blocks), chunk)


def test_another_chunk_is_refused_with_what_to_set() -> None:
    with pytest.raises(ValueError, match="chunks of 256 tokens") as refused:
        require_whole_blocks(_config(), _groups(784, 784), 256)
    assert re.findall(r"(\S+) to (\d+)", str(refused.value)) == [("engine.block_size", "1024")]


def test_engines_on_a_cpu_hand_over_one_kind_of_layers() -> None:
    require_whole_blocks(_config("cpu"), _groups(128), 128)
    with pytest.raises(ValueError, match="2 kinds of layers"):
        require_whole_blocks(_config("cpu"), _groups(544, 544), 544)


def _vllms_blocks(folder: Path, heads: int, given: int | None) -> tuple[int, int]:
    """Return vLLM's blocks, of attention and of Mamba, for a model with this many Mamba heads."""
    hybrid = GraniteMoeHybridConfig(
        vocab_size=4096, hidden_size=32 * heads, num_hidden_layers=4, num_key_value_heads=1,
        layer_types=["mamba", "mamba", "mamba", "attention"], num_attention_heads=heads // 2,
        mamba_n_heads=heads, mamba_d_head=64, mamba_d_state=128, mamba_expand=2,
        num_local_experts=0, shared_intermediate_size=512, position_embedding_type="nope",
        max_position_embeddings=8192,
    )  # fmt: skip
    hybrid.architectures = ["GraniteMoeHybridForCausalLM"]
    hybrid.save_pretrained(folder)
    config = EngineArgs(
        str(folder), skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True,
        enable_prefix_caching=True, **({"block_size": given} if given else {}),
    ).create_engine_config()  # fmt: skip
    current_platform._align_hybrid_block_size(config, CPUAttentionBackend)
    return config.cache_config.block_size, config.cache_config.mamba_block_size


# The state of 8 heads fits in 1,024 tokens where it is kept as bfloat16, not as float32.
@pytest.mark.parametrize(("heads", "fits"), [(4, True), (8, None), (16, False)])
def test_vllm_takes_a_hybrid_models_block_size_from_the_operator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heads: int, fits: bool | None
) -> None:
    """By itself it makes blocks as large as a Mamba state, whose type depends on the CPU."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    own, of_mamba = _vllms_blocks(tmp_path, heads, None)
    assert own == of_mamba > 128  # A state does not fit in a block of the CPU backend.
    told, of_mamba = _vllms_blocks(tmp_path, heads, _STATE_BLOCK_TOKENS)
    assert told == of_mamba
    assert fits in (None, own <= _STATE_BLOCK_TOKENS)
    if own <= _STATE_BLOCK_TOKENS:
        assert told == _STATE_BLOCK_TOKENS
        require_whole_blocks(_config(), _groups(told, told), _STATE_BLOCK_TOKENS)
        return
    # The state is larger: the engine refuses the chunk, and vLLM keeps to the size that it names.
    with pytest.raises(ValueError, match=r"engine\.block_size") as refused:
        require_whole_blocks(_config(), _groups(told, told), _STATE_BLOCK_TOKENS)
    named = int(re.findall(r"engine\.block_size to (\d+)", str(refused.value))[0])
    assert _vllms_blocks(tmp_path, heads, named) == (named, named)
    require_whole_blocks(_config(), _groups(named, named), named)


@pytest.mark.parametrize(
    ("config", "name", "layers", "kept_as"),
    [
        (Qwen3NextConfig(mamba_ssm_dtype="float32"), "Qwen3NextForCausalLM", 36, "auto"),
        (Qwen3NextConfig(), "Qwen3NextForCausalLM", 36, "float32"),
        # Its layers are Qwen3-Next's; its own class wants torchvision.
        (Qwen3_5TextConfig(mamba_ssm_dtype="float32"), "Qwen3NextForCausalLM", 24, "auto"),
        (JambaConfig(), "JambaForCausalLM", 28, "auto"),
        (FalconH1Config(mamba_n_groups=2, mamba_d_state=128), "FalconH1ForCausalLM", 32, "auto"),
        (
            GraniteMoeHybridConfig(layer_types=["mamba"] * 31 + ["attention"]),
            "GraniteMoeHybridForCausalLM", 31, "auto",
        ),
        (NemotronHConfig(), "NemotronHForCausalLM", None, "auto"),
    ],
)  # fmt: skip
def test_states_take_what_vllm_keeps_of_them(
    config: Any, name: str, layers: int | None, kept_as: str
) -> None:
    model, _ = ModelRegistry.resolve_model_cls(
        [name], SimpleNamespace(hf_config=config, runner_type="generate", convert_type="none",
                                model_impl="auto", trust_remote_code=False),
    )  # fmt: skip
    vllm_config: Any = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=config, hf_text_config=config, dtype=torch.bfloat16),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        cache_config=SimpleNamespace(
            mamba_cache_dtype="auto", mamba_ssm_cache_dtype=kept_as, use_replayssm=False
        ),
        num_speculative_tokens=0,
        speculative_config=None,
    )
    if own := vllms_config.MODELS_CONFIG_MAP.get(
        type(config).__name__.replace("TextConfig", "Config").replace("Config", "ForCausalLM")
    ):
        own.verify_and_update_config(vllm_config)
    shapes = model.get_mamba_state_shape_from_config(vllm_config)
    dtypes = model.get_mamba_state_dtype_from_config(vllm_config)
    expected = sum(
        math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)
    )
    counted, state_bytes = states_of(values(config), 2, kept_as)
    assert state_bytes == expected
    assert layers in (None, counted)
