"""Internals of other projects that parts of the product reach for by themselves.

These are no patches: the part is a subclass by a public extension point, or wraps an object that it
holds. It calls `require` with its record here before.
"""

from deployments.upstream.patch import Patch


def _attributes(owner: str, names: str) -> tuple[str, ...]:
    return tuple(f"{owner}.{name}" for name in names.split())


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

_CONNECTOR = "lmcache.integration.vllm.lmcache_mp_connector:LMCacheMPConnector"
_SCHEDULING = "lmcache.integration.vllm.vllm_multi_process_adapter:LMCacheMPSchedulerAdapter"
_WORKING = "lmcache.integration.vllm.vllm_multi_process_adapter:LMCacheMPWorkerAdapter"
_TRACKER = "lmcache.integration.vllm.lmcache_mp_metadata:LMCacheMPRequestTracker"
LMCACHE_CONNECTOR = Patch(
    name="lmcache_connector",
    package="lmcache",
    versions="==0.5.6",
    seams=(
        f"{_CONNECTOR}.__init__(self, vllm_config, role, kv_cache_config)",
        f"{_CONNECTOR}.wait_for_save(self)",
        f"{_CONNECTOR}.get_finished(self, finished_req_ids)",
        f"{_CONNECTOR}.get_transfer_results(self, finished_req_ids)",
        f"{_CONNECTOR}.get_num_new_matched_tokens(self, request, num_computed_tokens)",
        f"{_CONNECTOR}.build_connector_meta(self, scheduler_output)",
        f"{_CONNECTOR}.request_finished(self, request, block_ids)",
        f"{_CONNECTOR}._report_block_allocation_deltas(self, scheduler_output)",
        f"{_CONNECTOR}._get_or_create_request_tracker(self, request)",
        f"{_TRACKER}.get_token_ids(self)",
        f"{_TRACKER}.increase_num_scheduled_tokens(self, num_new_tokens)",
        f"{_SCHEDULING}.cleanup_lookup_result(self, request_id)",
        f"{_SCHEDULING}._create_key"
        "(self, token_ids, start, end, request_id, cache_salt, request_configs)",
        f"{_SCHEDULING}._ensure_heartbeat_started(self)",
        f"{_WORKING}._ensure_heartbeat_started(self)",
        *_attributes(
            _CONNECTOR,
            "_can_store _hit_alignment_tokens _report_request_errors "
            "_reserve_last_token_for_lookup request_trackers",
        ),
        *_attributes(
            _TRACKER,
            "lookup_started_at max_offload_tokens num_lmcache_hit_tokens "
            "num_prompt_tokens num_scheduled_tokens num_stored_tokens num_vllm_hit_tokens",
        ),
        *_attributes(_SCHEDULING, "_health_events req_clients"),
        *_attributes(
            _WORKING,
            "_health_event req_client retrieve_futures store_events store_futures transfer_ctx",
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

_PROTOCOL = "uvicorn.protocols.http.httptools_impl:HttpToolsProtocol"
HALF_CLOSED = Patch(
    name="half_closed",
    package="uvicorn",
    versions="==0.54.*",
    seams=(
        f"{_PROTOCOL}.eof_received(self)",
        f"{_PROTOCOL}.connection_lost(self, exc)",
        f"{_PROTOCOL}.on_headers_complete(self)",
        f"{_PROTOCOL}.on_response_complete(self)",
        *_attributes(_PROTOCOL, "config cycle loop pipeline transport"),
        *_attributes(
            "uvicorn.protocols.http.httptools_impl:RequestResponseCycle",
            "chunked_encoding keep_alive more_body response_complete response_started scope",
        ),
        *_attributes("uvicorn.server:Server", "server_state servers should_exit started"),
    ),
    why="a client that closes its side after its last byte and waits for the answer gets none",
    upstream="Kludex/uvicorn#1264 (closed) and PR #2924 (closed unmerged)",
    ends="the first test of tests/unit/deployments/router/test_connection.py fails",
    process="router",
    used_by="deployments/router/router.py",
)

SEAMS = (SCHEDULER, LMCACHE_CONNECTOR, HALF_CLOSED)
