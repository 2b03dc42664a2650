"""For which engines there can be a lane, and for which requests."""

from typing import Any


def require_fit(vllm_config: Any, kv_cache_config: Any) -> None:
    """Refuse an engine that the lane cannot compute prompts of.

    Raises:
        ValueError: says why, and what to do.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    groups = kv_cache_config.kv_cache_groups
    gpu = vllm_config.device_config.device_type != "cpu"
    reasons = (
        (parallel.world_size > 1, "the engine has several workers"),
        (parallel.data_parallel_size > 1, "the engine has several ranks of data"),
        (
            len(groups) != 1 or type(groups[0].kv_cache_spec) is not FullAttentionSpec,
            "not all of the model's layers are full attention of one kind",
        ),
        (model.is_encoder_decoder or model.is_multimodal_model, "the model reads more than text"),
        (model.uses_mrope or model.uses_xdrope_dim > 0, "positions are more than one number"),
        (gpu and bool(parallel.is_moe_model), "experts of steps and lane would share buffers"),
        (vllm_config.lora_config is not None, "LoRA adapters are switched step by step"),
        (vllm_config.speculative_config is not None, "a drafter would have no KV of the prompt"),
    )
    for applies, why in reasons:
        if applies:
            raise ValueError(f"prefill_lane: {why}, and the lane cannot do that; leave it off")


def fits(request: Any) -> bool:
    """Whether the lane can compute a request's prompt; else it is prefilled inline.

    A preempted one comes back inline: its output so far may still be under way.
    """
    return not (
        request.num_preemptions
        or request.prompt_embeds is not None
        or request.mm_features
        or request.lora_request is not None
        or request.pooling_params is not None
        or request.resumable
        # All of its prompt has to pass the sampler, for its log-probabilities.
        or request.skip_reading_prefix_cache
    )
