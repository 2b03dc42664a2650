"""Internals of other projects that parts of the product reach for by themselves.

These are no patches: the part is a subclass by a public extension point, or wraps an object that it
holds. It calls `require` with its record here before.
"""

from deployments.upstream.patch import Patch, of

SCHEDULER = Patch(
    name="scheduler",
    package="vllm",
    seams=(
        *of(
            "vllm.v1.core.sched.scheduler:Scheduler",
            "schedule update_from_output add_request reset_prefix_cache "
            "_reserve_prefill_lookahead _preempt_request _free_request _free_blocks "
            "kv_holding_waiting max_num_active_reqs",
        ),
        *of(
            "vllm.v1.core.sched.request_queue:PriorityRequestQueue",
            "_heap remove_requests add_request",
        ),
        *of(
            "vllm.v1.core.kv_cache_manager:KVCacheManager",
            "allocate_slots get_blocks get_computed_blocks",
        ),
        "vllm.v1.core.kv_cache_coordinator:UnitaryKVCacheCoordinator.find_longest_cache_hit",
        *of("vllm.v1.core.block_pool:BlockPool", "touch free_blocks get_num_free_blocks"),
        *of("vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue", "remove prepend_n"),
    ),
    why="vLLM has no public interface for a scheduler's order, chunks and retention",
    upstream="not reported: vLLM says that its scheduler's interface is not public",
    process="engine",
    used_by="deployments/engine/scheduler",
    without="engine_scheduler=vllm",
)


LANE = Patch(
    name="prefill_lane",
    package="vllm",
    seams=(
        *of(
            "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1",
            "get_num_new_matched_tokens update_state_after_alloc get_finished "
            "get_block_ids_with_load_errors",
        ),
        *of(
            "vllm.v1.core.sched.scheduler:Scheduler",
            "_update_waiting_for_remote_kv _handle_invalid_blocks ec_connector "
            "encoder_cache_manager",
        ),
        *of(
            "vllm.v1.core.encoder_cache_manager:EncoderCacheManager",
            "check_and_update_cache can_allocate allocate free free_encoder_input cached "
            "cache_size freed freeable num_freeable_slots",
        ),
        "vllm.v1.attention.backend:AttentionMetadataBuilder.build",
        *of(
            "vllm.v1.attention.backend:CommonAttentionMetadata",
            "seq_lens_cpu_upper_bound is_prefilling",
        ),
        *of("vllm.v1.worker.utils:AttentionGroup", "create_metadata_builders get_metadata_builder"),
        "vllm.v1.worker.utils:sanity_check_mm_encoder_outputs",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.attn_groups",
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.attn_groups",
        *of(
            "vllm.v1.worker.gpu_worker:Worker",
            "compile_or_warm_up_model execute_model sample_tokens",
        ),
        *of("vllm.multimodal.utils", "group_and_batch_mm_kwargs get_mm_features_in_window"),
        *of(
            "vllm.model_executor.models.interfaces:SupportsMultiModal",
            "embed_multimodal embed_input_ids _tower_model_names",
        ),
        "vllm.model_executor.models.interfaces:SupportsMRoPE.get_mrope_input_positions",
        "vllm.config.model:ModelConfig.mrope_num_dims",
        "vllm.forward_context:set_forward_context",
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
    seams=(
        *of("vllm.distributed.parallel_state", "graph_capture GraphCaptureContext"),
        "vllm.utils.torch_utils:current_stream",
        *of(
            "vllm.compilation.cuda_graph:CUDAGraphWrapper",
            "_all_instances concrete_cudagraph_entries",
        ),
        *of(
            "vllm.compilation.breakable_cudagraph:BreakableCUDAGraphWrapper",
            "_all_instances entries",
        ),
        "vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager.graphs",
        *of(
            "vllm.v1.worker.gpu.model_runner:GPUModelRunner",
            "cudagraph_manager main_stream capture_model",
        ),
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.capture_model",
        "vllm.v1.worker.gpu_worker:Worker.load_model",
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
    seams=(
        *of("vllm.v1.engine.async_llm:AsyncLLM", "output_processor logger_manager"),
        "vllm.v1.engine.output_processor:OutputProcessor.request_states",
        *of(
            "vllm.v1.engine.output_processor:RequestState",
            "external_req_id is_prefilling prompt_len",
        ),
        "vllm.v1.metrics.loggers:StatLoggerManager.stat_loggers",
        "vllm.v1.metrics.loggers:StatLoggerBase.record",
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
    seams=(
        *of(
            "ray.llm._internal.serve.engines.vllm.vllm_engine:VLLMEngine",
            "_prepare_engine_config _engine_client build_asgi_app",
        ),
        *of(
            "ray.llm._internal.serve.core.server.llm_server:LLMServer",
            "__init__ _start_engine engine",
        ),
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


SERVING = Patch(
    name="serving",
    package="vllm",
    seams=(
        "vllm.v1.engine.async_llm:AsyncLLM.generate",
        "vllm.v1.engine.input_processor:InputProcessor.process_inputs",
        *of(
            "vllm.renderers.online_renderer:OnlineRenderer",
            "render_chat render_completion preprocess_chat",
        ),
        *of(
            "vllm.renderers.base:BaseRenderer",
            "_tokenize_prompt_async _executor _wants_offsets _build_tokens_prompt",
        ),
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
    seams=(
        "vllm.multimodal.media.connector:MediaConnector._load_data_url",
        "vllm.multimodal.media.image:ImageMediaIO.load_bytes",
    ),
    why="a body with 40 MB of base64 stops all streams for half a second",
    upstream="vllm-project/vllm#48147 (an RFC)",
    process="server",
    used_by="deployments/engine/vision/aside.py",
)

LMCACHE_CONNECTOR = Patch(
    name="lmcache_connector",
    package="lmcache",
    seams=(
        *of(
            "lmcache.integration.vllm.lmcache_mp_connector:LMCacheMPConnector",
            "__init__ register_kv_caches handle_preemptions wait_for_save "
            "build_connector_worker_meta get_finished get_transfer_results "
            "get_num_new_matched_tokens build_connector_meta bind_gpu_block_pool "
            "update_connector_output get_kv_connector_stats request_finished "
            "_report_block_allocation_deltas _get_or_create_request_tracker _can_store "
            "_hit_alignment_tokens _report_request_errors _reserve_last_token_for_lookup "
            "request_trackers",
        ),
        *of(
            "lmcache.integration.vllm.lmcache_mp_metadata:LMCacheMPRequestTracker",
            "get_token_ids increase_num_scheduled_tokens lookup_started_at max_offload_tokens "
            "num_lmcache_hit_tokens num_prompt_tokens num_scheduled_tokens num_stored_tokens "
            "num_vllm_hit_tokens",
        ),
        *of(
            "lmcache.integration.vllm.vllm_multi_process_adapter:LMCacheMPSchedulerAdapter",
            "cleanup_lookup_result _create_key _ensure_heartbeat_started _health_events "
            "req_clients",
        ),
        *of(
            "lmcache.integration.vllm.vllm_multi_process_adapter:LMCacheMPWorkerAdapter",
            "_ensure_heartbeat_started _health_event req_client retrieve_futures store_events "
            "store_futures transfer_ctx",
        ),
        *of(
            "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1",
            "bind_connector_metadata clear_connector_metadata",
        ),
        "vllm.v1.outputs:KVConnectorOutput.failed_recving",
    ),
    why="LMCache's connector has an engine wait for its server, or end with it",
    upstream=(
        "LMCache/LMCache#4185, #4715, #4795, #4797, #4938: the connector's methods say which; not "
        "reported: after a failed load BYPASS_LMCACHE forgets vLLM's own prefix hit, so stores run "
        "late and read blocks that a sliding window has given up, and a preempted request whose "
        "load fails is looked up and loaded again without bound"
    ),
    ends="remove a method and run tests/unit/deployments/engine/test_lmcache_connector.py",
    process="connector",
    used_by="deployments/engine/lmcache_connector.py",
)

HALF_CLOSED = Patch(
    name="half_closed",
    package="uvicorn",
    seams=(
        *of(
            "uvicorn.protocols.http.httptools_impl:HttpToolsProtocol",
            "eof_received connection_lost on_headers_complete on_response_complete config cycle "
            "loop pipeline transport",
        ),
        *of(
            "uvicorn.protocols.http.httptools_impl:RequestResponseCycle",
            "chunked_encoding keep_alive more_body response_complete response_started scope",
        ),
        *of("uvicorn.server:Server", "server_state servers should_exit started"),
    ),
    why="a client that closes its side after its last byte and waits for the answer gets none",
    upstream="Kludex/uvicorn#1264 (closed) and PR #2924 (closed unmerged)",
    ends="the first test of tests/unit/deployments/router/test_connection.py fails",
    process="router",
    used_by="deployments/router/router.py",
)

SEAMS = (
    SCHEDULER,
    LANE,
    SM_SLOTS,
    LOAD,
    RAY_LLM,
    SERVING,
    MEDIA_ASIDE,
    LMCACHE_CONNECTOR,
    HALF_CLOSED,
)
