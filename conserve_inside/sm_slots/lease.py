"""How an engine's worker leases SMs from its node's actor, and what it is told for that."""

import time
from typing import Any

from conserve.wire import SILENCE_S
from conserve_inside.sm_slots.green_contexts import SmsUnavailable
from hetero.nvml import UnknownGpu
from hetero.sm_slots import NoFreeSms, SmLease

SLOT_WORKER = "conserve_inside.sm_slots.worker.SlotWorker"
SLOT_LANE_WORKER = "conserve_inside.sm_slots.worker.SlotLaneWorker"

SLOT_ENVIRONMENT = {
    # Without it vLLM runs shared experts on a stream of its own, which does not keep to the SMs.
    "VLLM_DISABLE_SHARED_EXPERTS_STREAM": "1",
    # FlashInfer's top-k launches up to one block for each SM of the whole GPU, and blocks wait for
    # others. On few SMs it may never end: vLLM does not use it on GPUs with 16 SMs or fewer.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}

# Within the connector's configuration, which is in no key of a compiled model: engines that differ
# in it load what the first one has compiled.
_KEY = "conserve.sm_slots"
# A killed predecessor loses its SMs within `SILENCE_S`; the actor may be starting again.
_TIMEOUT_S = SILENCE_S + 45.0
_CALL_TIMEOUT_S = 10.0
_RETRY_S = 1.0


def tell_worker(slots: int, engine_id: str, node_actor: str) -> dict[str, Any]:
    """Return what the worker needs to lease SMs, for its connector's extra configuration."""
    return {_KEY: {"slots": slots, "engine_id": engine_id, "node_actor": node_actor}}


def told(vllm_config: Any) -> dict[str, Any]:
    found: dict[str, Any] = vllm_config.kv_transfer_config.kv_connector_extra_config[_KEY]
    return found


def said_of(lease: SmLease) -> list[Any]:
    """Return a lease in a form that vLLM can pass between its processes."""
    return [*lease[:3], lease.units.start, lease.units.stop, lease.slots, lease.sms]


def lease_of(said: list[Any]) -> SmLease:
    lease_id, gpu, owner, start, stop, slots, sms = said
    return SmLease(lease_id, gpu, owner, range(start, stop), slots, sms)


def lease_slots(gpu: str, slots: int, engine_id: str, node_actor: str) -> SmLease:
    """Lease ``slots`` tenths of a GPU's SMs; waits, within bounds, for a predecessor's.

    Raises `NoFreeSms`, `UnknownGpu` if the actor does not see that GPU, or `SmsUnavailable`.
    """
    # Only workers lease. Other processes load this file without Ray.
    import ray

    from deployments.detached import call
    from deployments.node.node import NodeService

    deadline_s = time.monotonic() + _TIMEOUT_S
    while True:
        try:
            actor = ray.get_actor(node_actor, namespace="serve")
            asked = call(actor, NodeService.lease_sm_slots, gpu, engine_id, slots)
            lease: SmLease = ray.get(asked, timeout=_CALL_TIMEOUT_S)
            return lease
        except (NoFreeSms, UnknownGpu) as error:
            # Ray's error has the traceback of the actor's process in its text.
            cause = getattr(error, "cause", error)
            if isinstance(error, UnknownGpu) or time.monotonic() > deadline_s:
                raise cause from None
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError, ValueError) as error:
            if time.monotonic() > deadline_s:
                raise SmsUnavailable(f"the node's actor does not answer: {error}") from None
        time.sleep(_RETRY_S)
