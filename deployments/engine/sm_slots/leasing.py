"""A worker's lease of SMs, from the actor of its node."""

import time

import ray

from conserve.wire import SILENCE_S
from deployments.detached import call
from deployments.node.node import NodeService
from hetero.gpus import UnknownGpu
from hetero.green_contexts import SmsUnavailable
from hetero.sm_slots import NoFreeSms, SmLease

# A predecessor that was killed loses its SMs within `SILENCE_S`; the actor may be starting again.
_TIMEOUT_S = SILENCE_S + 45.0
_CALL_TIMEOUT_S = 10.0
_RETRY_S = 1.0


def lease_slots(gpu: str, slots: int, engine_id: str, node_actor: str) -> SmLease:
    """Lease SMs; waits, within bounds, until a predecessor's are free.

    Args:
        gpu: as NVML names it.
        slots: how many tenths of it.
        engine_id: whose they are, for as long as that engine beats to the actor.
        node_actor: the actor's name.

    Raises:
        NoFreeSms: they are others', and stay so.
        UnknownGpu: the actor does not see that GPU.
        SmsUnavailable: the actor does not answer.
    """
    deadline_s = time.monotonic() + _TIMEOUT_S
    while True:
        try:
            actor = ray.get_actor(node_actor, namespace="serve")
            asked = call(actor, NodeService.lease_sm_slots, gpu, engine_id, slots)
            lease: SmLease = ray.get(asked, timeout=_CALL_TIMEOUT_S)
            return lease
        except (NoFreeSms, UnknownGpu) as error:
            # Ray adds the traceback of another process to what it says.
            cause = getattr(error, "cause", error)
            if isinstance(error, UnknownGpu) or time.monotonic() > deadline_s:
                raise cause from None
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError, ValueError) as error:
            if time.monotonic() > deadline_s:
                raise SmsUnavailable(f"the node's actor does not answer: {error}") from None
        time.sleep(_RETRY_S)
