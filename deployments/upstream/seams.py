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

SEAMS = (SCHEDULER,)
