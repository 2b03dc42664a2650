"""Waits until the cluster has nodes for each role, and asks which GPUs they have."""

import logging
import time

import ray
from ray.autoscaler.sdk import request_resources
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from conserve.settings import Settings, SettingsError
from hetero import tiers
from hetero.cards import Card, cards_here
from hetero.container import HostMemory, host_memory
from hetero.gpu_plan import GpuNode
from hetero.gpu_room import short_of_gpus
from hetero.tiers import role_tier

logger = logging.getLogger("ray.serve")

_LOOK_S = 1.0
# How long a node may take to answer; a first task there starts a process.
_ANSWER_S = 120.0


def wait_for_nodes(settings: Settings, gpu: bool, timeout_s: float) -> None:
    """Return when live nodes offer each role's tier and enough GPUs, or raise `SettingsError`."""
    deadline_s = time.monotonic() + timeout_s
    asked = False
    try:
        while True:
            nodes = tiers.offers(ray.nodes())
            absent = tiers.missing(settings, gpu, nodes)
            if gpu:
                absent += short_of_gpus(settings, nodes)
            if not absent:
                break
            left_s = deadline_s - time.monotonic()
            problems = "\n  ".join(absent)
            there = tiers.inventory(nodes).replace("\n", "\n  ")
            if left_s <= 0:
                raise SettingsError(
                    f"no place for ConServe on this cluster\n  {problems}\nIt has:\n  {there}\n"
                    "Start such a node, or change these settings."
                )
            if not asked:
                asked = True
                logger.warning(
                    "waiting %g s for nodes to join\n  %s\nThe cluster has:\n  %s",
                    timeout_s, problems, there,
                )  # fmt: skip
                # An autoscaler starts nodes only on request, and engines request none yet.
                _ask_autoscaler(settings, gpu)
            time.sleep(min(_LOOK_S, left_s))
    finally:
        if asked:
            # The request holds until withdrawn. Engines' reservations replace it, if they start.
            request_resources(bundles=[])


def _ask_autoscaler(settings: Settings, gpu: bool) -> None:
    bundles, labels = [], []
    roles = [(model, own) for model in settings.each.values() for _, own in model.roles]
    for model, own in roles:
        place = role_tier(model, own, gpu)
        gpus = {"GPU": own.num_gpus} if gpu else {}
        # Without GPUs, one node of each tier has room for all its engines.
        for _ in range(own.replicas * model.workers_of(own) if gpu else 1):
            bundles.append({"CPU": 1, **gpus, **place.resources})
            labels.append(dict(place.labels))
    request_resources(bundles=bundles, bundle_label_selectors=labels)


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
    for node, offer in zip(nodes, tiers.offers(nodes), strict=True):
        task = asked.get(node["NodeID"])
        cards, memory = _look() if task is None else ray.get(task, timeout=_ANSWER_S)
        found.append(GpuNode(offer, cards, memory.available_bytes, memory))
    return found


def _look() -> tuple[tuple[Card, ...], HostMemory]:
    return cards_here(), host_memory()
