"""Has a worker wait for its GPU's memory before vLLM looks whether there is enough.

vLLM ends an engine at once that finds too little. What a killed engine had is free only when
LMCache's server, which has its KV space mapped, misses its heartbeats.
"""

import functools
import logging
import math
import sys
import time
from typing import Any

from deployments.upstream.patch import Patch

logger = logging.getLogger("vllm.conserve")

# LMCache's server misses an engine within 37.5 seconds (`REAPED_S` of node/lmcache_server.py).
# Beyond that: the end of the process, and of CUDA.
TIMEOUT_S = 60.0
_LOOKS_EVERY_S = 0.5


def apply() -> None:
    from vllm.v1.worker import utils

    request = utils.request_memory

    @functools.wraps(request)
    def requested(init_snapshot: Any, cache_config: Any, external_weight_memory: int = 0) -> int:
        total_bytes = init_snapshot.total_memory
        needed_bytes = math.ceil(total_bytes * cache_config.gpu_memory_utilization)
        needed_bytes -= external_weight_memory
        if init_snapshot.free_memory < needed_bytes <= total_bytes:
            _wait(init_snapshot, needed_bytes)
        bytes_: int = request(init_snapshot, cache_config, external_weight_memory)
        return bytes_

    # A worker's module, if it is loaded already, has the function under its name.
    for module in ("utils", "gpu_worker"):
        if (loaded := sys.modules.get(f"vllm.v1.worker.{module}")) is not None:
            loaded.request_memory = requested  # type: ignore[attr-defined]


def _wait(snapshot: Any, needed_bytes: int) -> None:
    logger.warning(
        "%s is free of %s that this engine needs of its GPU; waiting for up to %g s, until "
        "LMCache's server unmaps the memory of an engine that was here",
        _gib(snapshot.free_memory), _gib(needed_bytes), TIMEOUT_S,
    )  # fmt: skip
    since_s = time.monotonic()
    while snapshot.free_memory < needed_bytes and time.monotonic() - since_s < TIMEOUT_S:
        time.sleep(_LOOKS_EVERY_S)
        snapshot.measure()


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"


PATCH = Patch(
    name="impatient_memory_check",
    seams=("vllm.v1.worker.utils:request_memory", "vllm.utils.mem_utils:MemorySnapshot.measure"),
    why="an engine that replaces a killed one fails for lack of GPU memory until LMCache misses it",
    upstream="LMCache#3206 (its cause); not reported: request_memory could wait some seconds",
    process="engine",
    device="cuda",
)
