"""A GPU worker waits for its predecessor's memory before it looks whether there is enough.

vLLM 0.29 ends an engine at once that finds less memory free than it wants. What an engine had that
was killed is free once LMCache's server misses its heartbeats; until then every replacement would
fail, and load its model again.

vLLM loads this in each of its processes, with the plugin in `engine_end`. What it takes the place
of is ``request_memory`` in vLLM 0.29.0's ``v1/worker/utils`` and ``v1/worker/gpu_worker``: check it
when that version changes.
"""

import functools
import logging
import math
import sys
from collections.abc import Callable
from typing import Any

from deployments.engine.gpu_worker import GpuWorker
from deployments.node.lmcache_server import REAPED_S
from hetero.cards import wait_for_memory
from hetero.nvml import Nvml, NvmlError

logger = logging.getLogger("vllm.conserve")

# Beyond what the server needs to miss an engine: that process's own end, and CUDA's.
TIMEOUT_S = REAPED_S + 22.5


def register() -> None:
    """Have this process wait, if its engine runs on a GPU of NVIDIA's. May be called repeatedly.

    A vLLM that asks for memory in another way is left as it is, with a warning.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return
    from vllm.v1.worker import utils

    request = getattr(utils, "request_memory", None)
    if request is None:
        logger.warning(
            "this vLLM has no request_memory to replace: an engine may not start while its "
            "predecessor's memory is mapped; deployments/engine/gpu_memory.py has to be adapted"
        )
        return
    if hasattr(request, "__wrapped__"):
        return
    patient = _patient(request)
    utils.request_memory = patient
    worker = sys.modules.get("vllm.v1.worker.gpu_worker")
    if worker is not None:
        worker.request_memory = patient  # type: ignore[attr-defined]


def _patient(request: Callable[[Any, Any], int]) -> Callable[[Any, Any], int]:
    @functools.wraps(request)
    def requested(init_snapshot: Any, cache_config: Any) -> int:
        total_bytes = init_snapshot.total_memory
        needed_bytes = math.ceil(total_bytes * cache_config.gpu_memory_utilization)
        if init_snapshot.free_memory < needed_bytes <= total_bytes:
            worker = GpuWorker()
            worker.device = init_snapshot.device_
            try:
                with Nvml() as nvml:
                    uuid = worker.conserve_gpu_uuid()
                    wait_for_memory(nvml, uuid, needed_bytes, TIMEOUT_S)
            except NvmlError as error:
                logger.warning("not waiting for the GPU's memory: %s", error)
            init_snapshot.measure()
        return request(init_snapshot, cache_config)

    return requested
