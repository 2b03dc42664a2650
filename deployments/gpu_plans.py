"""The application's plan for GPUs: of this machine before anything runs, or of given nodes."""

import os
from collections.abc import Sequence

import psutil

from conserve.settings import Settings, SettingsError
from deployments.model_files import model_shape
from hetero.cards import cards_here
from hetero.gpu_layout import with_counts
from hetero.gpu_plan import GpuNode, GpuPlan, plan
from hetero.gpu_room import require_shares, short_of_gpus
from hetero.model_shape import ModelShape, ModelUnknown
from hetero.sm_room import require_slots
from hetero.tiers import NodeOffer, missing


def here() -> GpuNode:
    """This machine, as a cluster of one node that is yet to start."""
    cards = cards_here()
    resources = {"CPU": float(os.cpu_count() or 1), "GPU": float(len(cards))}
    offer = NodeOffer("of this machine", resources, {})
    return GpuNode(offer, cards, psutil.virtual_memory().available)


def plan_on(settings: Settings, nodes: Sequence[GpuNode]) -> tuple[Settings, GpuPlan]:
    """The plan for these nodes, as if the application started there now.

    Raises:
        SettingsError: the engines do not fit, or there are too few GPUs; says the sums.
    """
    chosen = with_counts(settings, gpus_of(nodes))
    require_shares(chosen)
    require_slots(chosen)
    offered = [node.offer for node in nodes]
    short = missing(chosen, True, offered) + short_of_gpus(chosen, offered)
    if short:
        raise SettingsError("\n  ".join(short))
    return planned(chosen.on_nodes(len(nodes)), nodes)


def planned(settings: Settings, nodes: Sequence[GpuNode]) -> tuple[Settings, GpuPlan]:
    """The plan for these nodes, once engines are counted.

    Raises:
        SettingsError: the engines do not fit; says the sums.
    """
    shape: ModelShape | None = None
    why = ""
    try:
        shape = model_shape(settings)
    except ModelUnknown as error:
        why = f"model: {error}"
    return plan(settings, nodes, shape, why)


def gpus_of(nodes: Sequence[GpuNode]) -> int:
    """How many GPUs these nodes have."""
    return int(sum(node.offer.resources.get("GPU", 0) for node in nodes))
