"""Whether a model's kinds of layers can be handed over by LMCache, and in which chunks.

vLLM gives layers of different kinds (full attention, sliding windows, Mamba or linear attention)
groups of their own, each with its blocks. A chunk has to be a whole number of every group's. Where
there are Mamba layers, a block is as large as one of their states, 544 or 784 tokens for instance,
and that is known when the engine has loaded, while LMCache's server has long been started.
"""

import math
from typing import Any


def require_whole_blocks(vllm_config: Any, kv_cache_config: Any, chunk_tokens: int | None) -> None:
    """Refuse a model whose KV LMCache 0.5.6 cannot hand over as it is set up; says what to do.

    Raises:
        ValueError: on a CPU, there are several kinds of layers; or a chunk is no whole number of
            blocks.
    """
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
