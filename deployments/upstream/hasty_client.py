"""Has LMCache's client wait longer for a server that is busy.

LMCache 0.5.6 waits for a heartbeat's answer no longer than between two of them, and for a
registration as long as for a look-up. A server that moves KV on a busy machine may take more than a
second for a heartbeat, and a registration may have it start CUDA. A broken connection ends either
wait (see `lost_server`).
"""

import functools
from collections.abc import Callable
from typing import Any

from deployments.upstream.patch import Patch, of

PING_TIMEOUT_S = 5.0
# A server may still write a load that was given up, over what the engine puts there next. So on a
# GPU a silent server does not count as lost before it would have been killed.
GPU_PING_TIMEOUT_S = 60.0
# A server may have to start CUDA, and to map an engine's KV space.
REGISTRATION_TIMEOUT_S = 120.0
_REGISTERING = ("register_kv_cache", "register_kv_cache_engine_driven_context")


def apply() -> None:
    from lmcache.integration.vllm import vllm_multi_process_adapter as adapters
    from lmcache.v1.multiprocess.transport.zmq_impl.client import ZmqMultiprocessClient
    from vllm.platforms import current_platform

    on_gpu = current_platform.device_type != "cpu"
    ping = adapters.send_ping

    def send_ping(req_client: Any, timeout: float, instance_id: int | None = None) -> bool:
        # Schedulers have no id, and nothing is written for them.
        long = on_gpu and instance_id is not None
        timeout = max(timeout, GPU_PING_TIMEOUT_S if long else PING_TIMEOUT_S)
        return bool(ping(req_client, timeout, instance_id))

    adapters.send_ping = send_ping
    for name in _REGISTERING:
        setattr(ZmqMultiprocessClient, name, _patient(getattr(ZmqMultiprocessClient, name)))


def _patient(ask: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(ask)
    def asked(*given: Any, **named: Any) -> Any:
        answer = ask(*given, **named)
        result = answer.result
        answer.result = lambda timeout=None: result(max(timeout or 0.0, REGISTRATION_TIMEOUT_S))
        return answer

    return asked


PATCH = Patch(
    name="hasty_client",
    seams=(
        "lmcache.integration.vllm.vllm_multi_process_adapter:send_ping",
        "lmcache.integration.vllm.vllm_multi_process_adapter:HeartbeatThread._execute",
        *of("lmcache.v1.multiprocess.transport.base:RequestClient", " ".join(_REGISTERING)),
        "lmcache.v1.multiprocess.transport.zmq_impl.client:ZmqMultiprocessClient",
    ),
    why="a busy server counts as dead, so prompts are computed again; on a GPU, also wrong answers",
    upstream="not reported: options for the timeouts of HeartbeatThread's ping, and of registering",
    process="connector",
)
