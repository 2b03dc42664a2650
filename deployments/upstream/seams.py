"""Internals of other projects that parts of the product reach for by themselves.

These are no patches: the part is a subclass by a public extension point, or wraps an object that it
holds. It calls `require` with its record here before.
"""

from deployments.upstream.patch import Patch

SCHEDULER = Patch(
    name="scheduler",
    package="vllm",
    versions="==0.32.*",
    seams=(
        "vllm.v1.core.sched.scheduler:Scheduler.schedule(self, throttle_prefills)",
        "vllm.v1.core.sched.scheduler:Scheduler.update_from_output"
        "(self, scheduler_output, model_runner_output)",
        "vllm.v1.core.sched.scheduler:Scheduler.add_request(self, request)",
        "vllm.v1.core.sched.scheduler:Scheduler.reset_prefix_cache"
        "(self, reset_running_requests, reset_connector)",
        "vllm.v1.core.sched.scheduler:Scheduler._reserve_prefill_lookahead"
        "(self, request, num_computed_tokens, num_new_tokens)",
        "vllm.v1.core.sched.scheduler:Scheduler._preempt_request"
        "(self, request, timestamp, drop_stale_output)",
        "vllm.v1.core.sched.scheduler:Scheduler._free_request(self, request, delay_free_blocks)",
        "vllm.v1.core.sched.scheduler:Scheduler._free_blocks(self, request)",
        "vllm.v1.core.sched.scheduler:Scheduler.kv_holding_waiting",
        "vllm.v1.core.sched.scheduler:Scheduler.max_num_active_reqs",
        "vllm.v1.core.sched.request_queue:PriorityRequestQueue._heap",
        "vllm.v1.core.sched.request_queue:PriorityRequestQueue.remove_requests(self, requests)",
        "vllm.v1.core.sched.request_queue:PriorityRequestQueue.add_request(self, request)",
        "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots(self, request, "
        "num_new_tokens, num_new_computed_tokens, new_computed_blocks, num_lookahead_tokens, "
        "num_external_computed_tokens, delay_cache_blocks, num_encoder_tokens, "
        "full_sequence_must_fit, reserved_blocks, has_scheduled_reqs, skip_zeroing_group_ids)",
        "vllm.v1.core.kv_cache_manager:KVCacheManager.get_blocks(self, request_id)",
        "vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks(self, request)",
        "vllm.v1.core.kv_cache_coordinator:UnitaryKVCacheCoordinator.find_longest_cache_hit"
        "(self, block_hashes, max_cache_hit_length)",
        "vllm.v1.core.block_pool:BlockPool.touch(self, blocks)",
        "vllm.v1.core.block_pool:BlockPool.free_blocks(self, ordered_blocks)",
        "vllm.v1.core.block_pool:BlockPool.get_num_free_blocks(self)",
        "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue.remove(self, block)",
        "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue.prepend_n(self, blocks)",
        "vllm.v1.engine.core:EngineCoreProc._handle_client_request(self, request_type, request)",
    ),
    why="vLLM has no public interface for a scheduler's order, chunks and retention",
    upstream="not reported: vLLM says that its scheduler's interface is not public",
    process="engine",
    used_by="deployments/engine/scheduler",
    without="engine_scheduler=vllm",
)

_ONLINE = "vllm.renderers.online_renderer:OnlineRenderer"

SERVING = Patch(
    name="serving",
    package="vllm",
    versions="==0.32.*",
    seams=(
        "vllm.v1.engine.async_llm:AsyncLLM.generate(self, prompt, sampling_params, request_id, *, "
        "prompt_text, lora_request, tokenization_kwargs, trace_headers, priority, "
        "data_parallel_rank, session_id, kv_hints, reasoning_ended, reasoning_parser_kwargs)",
        "vllm.v1.engine.input_processor:InputProcessor.process_inputs(self, request_id, "
        "prompt, params, supported_tasks, arrival_time, lora_request, tokenization_kwargs, "
        "trace_headers, priority, data_parallel_rank, resumable, session_id, kv_hints)",
        f"{_ONLINE}.render_chat(self, request, *, skip_mm_cache)",
        f"{_ONLINE}.render_completion(self, request, *, skip_mm_cache)",
        f"{_ONLINE}.preprocess_chat(self, request, messages, "
        "default_template, default_template_content_format, default_template_kwargs, tool_dicts, "
        "parser, *, skip_mm_cache)",
        "vllm.renderers.base:BaseRenderer._tokenize_prompt_async",
        "vllm.renderers.base:BaseRenderer._executor",
        "vllm.renderers.base:BaseRenderer._wants_offsets(self, prompt, params)",
        "vllm.renderers.base:BaseRenderer._build_tokens_prompt"
        "(token_ids, prompt, *, offset_mapping)",
    ),
    why=(
        "vLLM cannot judge or prefill a request without an answer, nor tell what became of one, "
        "and tokenizes a turn's whole history"
    ),
    upstream="vllm-project/vllm#47582 (a cache of tokens, an RFC); the rest is not reported",
    process="server",
    used_by="deployments/engine/engine.py",
)

MEDIA_ASIDE = Patch(
    name="media_aside",
    package="vllm",
    versions="==0.32.*",
    seams=(
        "vllm.multimodal.media.connector:MediaConnector._load_data_url(self, url, media_io)",
        "vllm.multimodal.media.image:ImageMediaIO.load_bytes(self, data)",
    ),
    why="a body with 40 MB of base64 stops all streams for half a second",
    upstream="vllm-project/vllm#48147 (an RFC)",
    process="server",
    used_by="deployments/engine/vision/aside.py",
)

SEAMS = (SCHEDULER, SERVING, MEDIA_ASIDE)
