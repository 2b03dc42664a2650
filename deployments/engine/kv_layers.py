"""The room that an engine's KV takes, by its model's kinds of layers, and whether chunks fit it.

vLLM gives layers of different kinds (full attention, sliding windows, Mamba) groups of their own,
each with its blocks, and a chunk has to be a whole number of every group's. A block may be as large
as a Mamba state, 784 tokens for instance. That is known only when the engine has loaded.
"""

import contextlib
import math
from typing import Any

from deployments.model_config import values
from hetero.host_memory import SNAPSHOT_TOKENS, stored_bytes
from hetero.model_shape import KvLayers, ModelUnknown, kv_of, kv_token_values, states_of


def require_whole_blocks(vllm_config: Any, kv_cache_config: Any, chunk_tokens: int | None) -> None:
    """Refuse a model whose KV LMCache 0.5.6 cannot hand over as it is set up; says what to do."""
    from lmcache.integration.vllm.lmcache_mp_connector import get_group_tokens_per_block

    counted = get_group_tokens_per_block(vllm_config, kv_cache_config)
    blocks = [tokens for tokens in counted if tokens]
    if len(blocks) > 1 and vllm_config.device_config.device_type == "cpu":
        raise ValueError(
            f"this model has {len(blocks)} kinds of layers, each with KV of its own, and LMCache "
            "0.5.6 hands over one kind from engines on a CPU; serve it on GPUs, or another model"
        )
    block = math.lcm(*blocks)
    if chunk_tokens is None or chunk_tokens % block == 0:
        return
    rounded = -(-max(blocks) // 256) * 256
    raise ValueError(
        f"KV is handed over in chunks of {chunk_tokens} tokens, and this model's has blocks of "
        f"{block}: set engine.block_size to {rounded}, which vLLM keeps and chunks follow"
    )


def capacity_tokens(cache_config: Any) -> int:
    """Return how many tokens of KV an engine holds, by its vLLM ``CacheConfig``.

    With several kinds of layers a token takes a block in each kind's table, of one pool.
    """
    counted = cache_config.kv_cache_size_tokens
    if counted is None:
        counted = cache_config.num_gpu_blocks * cache_config.block_size
    return int(counted)


def host_token_bytes(vllm_config: Any, chunk: int, page: int) -> float:
    """Return the bytes that a token of an engine's KV takes in LMCache's server.

    Layers with a sliding window are counted as if they kept every token, and states of recurrent
    ones by their usual number. The server hands out its memory in pages of ``page`` bytes.
    """
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE

    model, kept_as = vllm_config.model_config, vllm_config.cache_config.cache_dtype
    dtype = model.dtype if kept_as == "auto" else STR_DTYPE_TO_TORCH_DTYPE[kept_as]
    parallel = vllm_config.parallel_config
    tensor, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    # With one latent vector for all heads, all workers of a stage have the same, and one of them
    # stores it; unless there are states beside it, which differ.
    latent = model.use_mla
    each = kv_token_values(_kv(model), 1 if latent else tensor) * dtype.itemsize / stages
    writers = stages if latent and not model.is_hybrid else stages * tensor
    states = (0, 0)
    with contextlib.suppress(ModelUnknown):
        state_dtype = vllm_config.cache_config.mamba_ssm_cache_dtype
        states = states_of(values(model.hf_text_config), model.dtype.itemsize, state_dtype)
    return stored_bytes(each, writers, chunk, page) + math.prod(states) / SNAPSHOT_TOKENS


def _kv(model: Any) -> tuple[KvLayers, ...]:
    """Count what layers keep of each token, by vLLM's ``ModelConfig``: some may keep nothing."""
    config = values(model.hf_text_config)
    kv: tuple[KvLayers, ...] = ()
    with contextlib.suppress(ModelUnknown):
        kv = kv_of(config)
    layers = sum(one.layers for one in kv) or model.get_total_num_hidden_layers()
    if model.use_mla:
        return (KvLayers(layers, 1, model.get_head_size()),)
    if not kv or config.get("kv_lora_rank"):
        # Latent attention that is not kept as such.
        return (KvLayers(layers, model.get_total_num_kv_heads(), 2 * model.get_head_size()),)
    return kv
