"""Checks that this vLLM's internals are as the scheduler expects.

vLLM says that its scheduler's interface is not public. Where one of these has another signature,
the engine does not start, rather than schedule by a misunderstanding.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

MADE_FOR = "0.32"


def _expected() -> Sequence[tuple[Callable[..., Any], str]]:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_coordinator import UnitaryKVCacheCoordinator
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue
    from vllm.v1.core.sched.request_queue import PriorityRequestQueue
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCoreProc

    return (
        (Scheduler.schedule, "self throttle_prefills"),
        (Scheduler.update_from_output, "self scheduler_output model_runner_output"),
        (Scheduler.add_request, "self request"),
        (Scheduler.reset_prefix_cache, "self reset_running_requests reset_connector"),
        (
            Scheduler._reserve_prefill_lookahead,
            "self request num_computed_tokens num_new_tokens",
        ),
        (Scheduler._preempt_request, "self request timestamp drop_stale_output"),
        (Scheduler._free_request, "self request delay_free_blocks"),
        (Scheduler._free_blocks, "self request"),
        (PriorityRequestQueue.remove_requests, "self requests"),
        (PriorityRequestQueue.add_request, "self request"),
        (
            KVCacheManager.allocate_slots,
            "self request num_new_tokens num_new_computed_tokens new_computed_blocks "
            "num_lookahead_tokens num_external_computed_tokens delay_cache_blocks "
            "num_encoder_tokens full_sequence_must_fit reserved_blocks has_scheduled_reqs "
            "skip_zeroing_group_ids",
        ),
        (KVCacheManager.get_blocks, "self request_id"),
        (KVCacheManager.get_computed_blocks, "self request"),
        (
            UnitaryKVCacheCoordinator.find_longest_cache_hit,
            "self block_hashes max_cache_hit_length",
        ),
        (BlockPool.touch, "self blocks"),
        (BlockPool.free_blocks, "self ordered_blocks"),
        (BlockPool.get_num_free_blocks, "self"),
        (FreeKVCacheBlockQueue.remove, "self block"),
        (FreeKVCacheBlockQueue.prepend_n, "self blocks"),
        (EngineCoreProc._handle_client_request, "self request_type request"),
    )


def require_doors() -> None:
    """Refuse a vLLM that is not as the scheduler expects, with a `RuntimeError` of one line."""
    import vllm

    try:
        from vllm.v1.core.sched.request_queue import PriorityRequestQueue

        differing = differences(_expected())
        if not hasattr(PriorityRequestQueue(), "_heap"):
            differing.append("PriorityRequestQueue()._heap")
    except (ImportError, AttributeError) as error:
        differing = [str(error)]
    if differing:
        raise RuntimeError(
            f"the scheduler that knows conversations is made for vLLM {MADE_FOR}, and in this one "
            f"({vllm.__version__}) differ: {'; '.join(differing)}. Set engine_scheduler=vllm"
        )


def differences(expected: Sequence[tuple[Callable[..., Any], str]]) -> list[str]:
    """Return the functions whose parameters are not as expected, with those that they have."""
    return [
        f"{method.__qualname__}({', '.join(found)})"
        for method, names in expected
        if (found := list(inspect.signature(method).parameters)) != names.split()
    ]
