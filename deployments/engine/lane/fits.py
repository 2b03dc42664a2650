"""For which engines there can be a lane, and for which requests."""

from collections.abc import Callable, Sequence
from typing import Any

from deployments.engine.scheduler.doors import MADE_FOR, differences


def require_fit(vllm_config: Any, kv_cache_config: Any) -> None:
    """Refuse an engine that the lane cannot compute prompts of.

    Raises:
        ValueError: says why, and what to do.
        RuntimeError: this vLLM is another one than the lane was made for.
    """
    if differing := differences(_expected()):
        raise RuntimeError(
            f"the prefill lane is made for vLLM {MADE_FOR}, and in this one differ: "
            f"{'; '.join(differing)}. Set engine_scheduler=conversation"
        )
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
            raise ValueError(
                f"engine_scheduler: {why}, and the prefill lane cannot do that; set "
                "engine_scheduler=conversation"
            )


def _expected() -> Sequence[tuple[Callable[..., Any], str]]:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.forward_context import set_forward_context
    from vllm.v1.attention.backend import AttentionMetadataBuilder
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.utils import AttentionGroup

    return (
        (KVConnectorBase_V1.get_num_new_matched_tokens, "self request num_computed_tokens"),
        (KVConnectorBase_V1.update_state_after_alloc, "self request blocks num_external_tokens"),
        (KVConnectorBase_V1.get_finished, "self finished_req_ids"),
        (KVConnectorBase_V1.get_block_ids_with_load_errors, "self"),
        (Scheduler._update_waiting_for_remote_kv, "self request"),
        (Scheduler._handle_invalid_blocks, "self invalid_block_ids num_scheduled_tokens"),
        (
            AttentionMetadataBuilder.build,
            "self common_prefix_len common_attn_metadata fast_build",
        ),
        (
            AttentionGroup.create_metadata_builders,
            "self vllm_config device kernel_block_size num_metadata_builders",
        ),
        (
            set_forward_context,
            "attn_metadata vllm_config num_tokens num_tokens_across_dp cudagraph_runtime_mode "
            "batch_descriptor ubatch_slices slot_mapping skip_compiled is_padding",
        ),
    )


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
