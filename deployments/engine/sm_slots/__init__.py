"""An engine on leased SMs (``tiers.NAME.sm_slots``): its worker, its streams and its graphs.

`worker.py` leases them as the engine starts (`leasing.py`: from the node's actor); `pairs.py` has
decoding's and prefill's sides of them, for an engine that does both at a time; `captures.py` has
CUDA graphs captured on them. By what they are kept to, `hetero.sm_means` knows.
"""

from typing import Any

from hetero.sm_slots import SmLease

SLOT_WORKER = "deployments.engine.sm_slots.worker.SlotWorker"
LEASE_METHOD = "conserve_sm_lease"

# vLLM would run shared experts beside the others on a stream that keeps to no SMs.
SLOT_ENVIRONMENT = {"VLLM_DISABLE_SHARED_EXPERTS_STREAM": "1"}

# What the worker is told, in its connector's configuration: that is in no key of a compiled model,
# so engines that differ in it load what the first has compiled.
_KEY = "conserve.sm_slots"


def tell_worker(extra: dict[str, Any], slots: int, engine_id: str, node_actor: str) -> None:
    """Put what the worker needs into its connector's extra configuration.

    Args:
        slots: how many tenths of its GPU's SMs it is to lease.
        engine_id: whose they are.
        node_actor: the name of the actor that has the ledger.
    """
    extra[_KEY] = {"slots": slots, "engine_id": engine_id, "node_actor": node_actor}


def told(vllm_config: Any) -> dict[str, Any]:
    """Return what `tell_worker` has put there."""
    found: dict[str, Any] = vllm_config.kv_transfer_config.kv_connector_extra_config[_KEY]
    return found


def said_of(lease: SmLease) -> list[Any]:
    """A lease as what vLLM passes between its processes."""
    return [*lease[:3], lease.units.start, lease.units.stop, lease.slots, lease.sms]


def lease_of(said: list[Any]) -> SmLease:
    """The lease again."""
    lease_id, gpu, owner, start, stop, slots, sms = said
    return SmLease(lease_id, gpu, owner, range(start, stop), slots, sms)
