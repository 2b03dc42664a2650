"""Internals of other projects that parts of the product reach for by themselves.

These are no patches: the part is a subclass by a public extension point, or wraps an object that it
holds. It calls `require` with its record here before.
"""

from deployments.upstream.patch import Patch

_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_QUEUE = "vllm.v1.core.sched.request_queue:PriorityRequestQueue"

SCHEDULER = Patch(
    name="scheduler",
    package="vllm",
    versions="==0.32.*",
    seams=(
        f"{_SCHEDULER}.schedule(self, throttle_prefills)",
        f"{_SCHEDULER}.update_from_output(self, scheduler_output, model_runner_output)",
        f"{_SCHEDULER}.add_request(self, request)",
        f"{_SCHEDULER}.reset_prefix_cache(self, reset_running_requests, reset_connector)",
        f"{_SCHEDULER}._reserve_prefill_lookahead"
        "(self, request, num_computed_tokens, num_new_tokens)",
        f"{_SCHEDULER}._preempt_request(self, request, timestamp, drop_stale_output)",
        f"{_SCHEDULER}._free_request(self, request, delay_free_blocks)",
        f"{_SCHEDULER}._free_blocks(self, request)",
        f"{_SCHEDULER}.kv_holding_waiting",
        f"{_SCHEDULER}.max_num_active_reqs",
        f"{_QUEUE}._heap",
        f"{_QUEUE}.remove_requests(self, requests)",
        f"{_QUEUE}.add_request(self, request)",
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
    ),
    why="vLLM has no public interface for a scheduler's order, chunks and retention",
    upstream="not reported: vLLM says that its scheduler's interface is not public",
    process="engine",
    used_by="deployments/engine/scheduler",
    without="engine_scheduler=vllm",
)

_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1"
_ENCODED = "vllm.v1.core.encoder_cache_manager:EncoderCacheManager"
_MODELS = "vllm.model_executor.models.interfaces"

LANE = Patch(
    name="prefill_lane",
    package="vllm",
    versions="==0.32.*",
    seams=(
        f"{_CONNECTOR}.get_num_new_matched_tokens(self, request, num_computed_tokens)",
        f"{_CONNECTOR}.update_state_after_alloc(self, request, blocks, num_external_tokens)",
        f"{_CONNECTOR}.get_finished(self, finished_req_ids)",
        f"{_CONNECTOR}.get_block_ids_with_load_errors(self)",
        f"{_SCHEDULER}._update_waiting_for_remote_kv(self, request)",
        f"{_SCHEDULER}._handle_invalid_blocks(self, invalid_block_ids, num_scheduled_tokens)",
        f"{_SCHEDULER}.ec_connector",
        f"{_SCHEDULER}.encoder_cache_manager",
        f"{_ENCODED}.check_and_update_cache(self, request, input_id)",
        f"{_ENCODED}.can_allocate"
        "(self, request, input_id, encoder_compute_budget, num_embeds_to_schedule)",
        f"{_ENCODED}.allocate(self, request, input_id)",
        f"{_ENCODED}.free(self, request)",
        f"{_ENCODED}.free_encoder_input(self, request, input_id)",
        *(f"{_ENCODED}.{name}" for name in ("cached", "cache_size", "freed", "freeable")),
        f"{_ENCODED}.num_freeable_slots",
        "vllm.v1.attention.backend:AttentionMetadataBuilder.build"
        "(self, common_prefix_len, common_attn_metadata, fast_build)",
        "vllm.v1.attention.backend:CommonAttentionMetadata.seq_lens_cpu_upper_bound",
        "vllm.v1.attention.backend:CommonAttentionMetadata.is_prefilling",
        "vllm.v1.worker.utils:AttentionGroup.create_metadata_builders"
        "(self, vllm_config, device, kernel_block_size, num_metadata_builders)",
        "vllm.v1.worker.utils:AttentionGroup.get_metadata_builder(self, ubatch_id)",
        "vllm.v1.worker.utils:sanity_check_mm_encoder_outputs(mm_embeddings, expected_num_items)",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.attn_groups",
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.attn_groups",
        "vllm.v1.worker.gpu_worker:Worker.compile_or_warm_up_model(self)",
        "vllm.v1.worker.gpu_worker:Worker.execute_model(self, scheduler_output)",
        "vllm.v1.worker.gpu_worker:Worker.sample_tokens(self, grammar_output)",
        "vllm.multimodal.utils:group_and_batch_mm_kwargs(mm_kwargs, *, device, pin_memory)",
        "vllm.multimodal.utils:get_mm_features_in_window(mm_features, start, end)",
        f"{_MODELS}:SupportsMultiModal.embed_multimodal(self, **kwargs)",
        f"{_MODELS}:SupportsMultiModal.embed_input_ids"
        "(self, input_ids, multimodal_embeddings, *, is_multimodal)",
        f"{_MODELS}:SupportsMultiModal._tower_model_names",
        f"{_MODELS}:SupportsMRoPE.get_mrope_input_positions(self, input_tokens, mm_features)",
        "vllm.config.model:ModelConfig.mrope_num_dims",
        "vllm.forward_context:set_forward_context(attn_metadata, vllm_config, num_tokens, "
        "num_tokens_across_dp, cudagraph_runtime_mode, batch_descriptor, ubatch_slices, "
        "slot_mapping, skip_compiled, is_padding)",
    ),
    why="vLLM computes a prompt in its steps only, each as long as its largest part",
    upstream="not reported: vLLM says that its scheduler's and runners' interfaces are not public",
    process="engine",
    used_by="deployments/engine/lane",
    without="engine_scheduler=conversation",
)

SM_SLOTS = Patch(
    name="sm_slots",
    package="vllm",
    versions="==0.32.*",
    seams=(
        "vllm.distributed.parallel_state:graph_capture(device)",
        "vllm.distributed.parallel_state:GraphCaptureContext(stream)",
        "vllm.utils.torch_utils:current_stream()",
        "vllm.compilation.cuda_graph:CUDAGraphWrapper._all_instances",
        "vllm.compilation.cuda_graph:CUDAGraphWrapper.concrete_cudagraph_entries",
        "vllm.compilation.breakable_cudagraph:BreakableCUDAGraphWrapper._all_instances",
        "vllm.compilation.breakable_cudagraph:BreakableCUDAGraphWrapper.entries",
        "vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager.graphs",
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.cudagraph_manager",
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.main_stream",
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.capture_model(self, *, profile_only)",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.capture_model(self)",
        "vllm.v1.worker.gpu_worker:Worker.load_model(self, *, load_dummy_weights)",
    ),
    why="vLLM captures CUDA graphs on a stream of its own, which has all SMs of a GPU",
    upstream=(
        "not reported: graph_capture could take a stream or a context again, as "
        "graph_capture_context until 0.29: SM partitions need capture on the current stream"
    ),
    process="engine",
    device="cuda",
    used_by="deployments/engine/sm_slots",
)

LOAD = Patch(
    name="load",
    package="vllm",
    versions="==0.32.*",
    seams=(
        "vllm.v1.engine.async_llm:AsyncLLM.output_processor",
        "vllm.v1.engine.async_llm:AsyncLLM.logger_manager",
        "vllm.v1.engine.output_processor:OutputProcessor.request_states",
        "vllm.v1.engine.output_processor:RequestState.external_req_id",
        "vllm.v1.engine.output_processor:RequestState.is_prefilling",
        "vllm.v1.engine.output_processor:RequestState.prompt_len",
        "vllm.v1.metrics.loggers:StatLoggerManager.stat_loggers",
        "vllm.v1.metrics.loggers:StatLoggerBase.record"
        "(self, scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)",
    ),
    why="an engine's load is not known, by which turns are placed",
    upstream=(
        "vllm#17702 (loggers of one's own, which Ray Serve LLM does not pass on); not reported: "
        "AsyncLLM could tell the requests that it has, and which of them are prefilling"
    ),
    process="server",
    used_by="deployments/engine/load.py",
)

RAY_LLM = Patch(
    name="ray_llm",
    package="ray",
    versions="==2.60.*",
    seams=(
        "ray.llm._internal.serve.engines.vllm.vllm_engine:VLLMEngine._prepare_engine_config"
        "(self, callback_ctx)",
        "ray.llm._internal.serve.engines.vllm.vllm_engine:VLLMEngine._engine_client",
        "ray.llm._internal.serve.engines.vllm.vllm_engine:VLLMEngine.build_asgi_app(self)",
        "ray.llm._internal.serve.core.server.llm_server:LLMServer.__init__"
        "(self, llm_config, *, engine_cls, model_downloader)",
        "ray.llm._internal.serve.core.server.llm_server:LLMServer._start_engine(self)",
        "ray.llm._internal.serve.core.server.llm_server:LLMServer.engine",
        "ray.llm._internal.common.callbacks.base:CallbackCtx.run_init_node",
    ),
    why="an engine on a CPU has a process more, and each cluster an actor for statistics of use",
    upstream=(
        "not reported: on CPUs Ray Serve LLM replaces distributed_executor_backend (vLLM does so, "
        "too: its CPU platform makes 'uni' to 'mp' for a core in a process of its own); the usage "
        "actor starts although usage statistics are off"
    ),
    process="server",
    used_by="deployments/engine/engine.py",
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

SEAMS = (SCHEDULER, LANE, SM_SLOTS, LOAD, RAY_LLM, SERVING, MEDIA_ASIDE)
