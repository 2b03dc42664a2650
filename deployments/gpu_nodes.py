"""Asks the nodes of a Ray cluster which GPUs they have."""

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hetero.cards import Card, cards_here
from hetero.container import HostMemory, host_memory
from hetero.gpu_plan import GpuNode
from hetero.tiers import offers

# How long a node may take to answer; a first task there starts a process.
_LOOK_S = 120.0


def nodes_with_gpus() -> list[GpuNode]:
    """Return the nodes of the cluster that have GPUs; each is asked what it has."""
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU")]
    own = ray.get_runtime_context().get_node_id()
    look = ray.remote(num_cpus=0)(_look)
    asked = {}
    for node in nodes:
        if node["NodeID"] != own:
            place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            asked[node["NodeID"]] = look.options(scheduling_strategy=place).remote()
    found = []
    for node, offer in zip(nodes, offers(nodes), strict=True):
        task = asked.get(node["NodeID"])
        cards, memory = _look() if task is None else ray.get(task, timeout=_LOOK_S)
        found.append(GpuNode(offer, cards, memory.available_bytes, memory))
    return found


def _look() -> tuple[tuple[Card, ...], HostMemory]:
    return cards_here(), host_memory()
