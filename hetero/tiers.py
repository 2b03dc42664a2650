"""Decides which nodes a role may run on, and what to ask Ray for. Pure."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from conserve.settings import CPU_TIER, GPU_TIER, RoleSettings, Settings, TierSettings
from hetero.power import Cap

# Ray counts a node's kind as a resource of 1. Asking for a little of it selects such nodes without
# using it up.
_MARK = 0.001
_ACCELERATOR = "accelerator_type:"


@dataclass(frozen=True, slots=True)
class NodeOffer:
    """A live node, as Ray sees it."""

    name: str
    resources: Mapping[str, float]
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class RoleTier:
    """The tier that a role runs on; ``cpu`` or ``gpu`` if the role names none."""

    name: str
    resources: Mapping[str, float] = field(default_factory=dict)  # Asked of Ray by each worker.
    labels: Mapping[str, str] = field(default_factory=dict)  # For Ray's node selector.
    cap: Cap | None = None  # The power cap of its GPUs.
    sm_slots: int | None = None  # Tenths of a GPU's SMs for each engine; None: all.


def role_tier(settings: Settings, own: RoleSettings, gpu: bool) -> RoleTier:
    """Return the tier that a role runs on.

    Without GPUs, only a tier's custom resource and labels count. If it has none, the tier is
    ``cpu``.
    """
    if own.tier is None:
        return RoleTier(GPU_TIER if gpu else CPU_TIER)
    tier = settings.tiers.get(own.tier) or TierSettings(resource=own.tier)
    resources = {}
    if tier.resource is not None:
        resources[tier.resource] = _MARK
    if not gpu:
        marked = bool(resources or tier.labels)
        return RoleTier(own.tier if marked else CPU_TIER, resources, dict(tier.labels))
    if tier.accelerator_type is not None:
        resources[_ACCELERATOR + tier.accelerator_type] = _MARK
    cap = Cap(tier.power_cap_w, tier.power_cap_fraction)
    capped = None if cap == Cap() else cap
    return RoleTier(own.tier, resources, dict(tier.labels), capped, tier.sm_slots)


def offers(nodes: Iterable[Mapping[str, Any]]) -> list[NodeOffer]:
    """Return the live nodes of ``ray.nodes()``."""
    return [
        NodeOffer(node["NodeManagerAddress"], dict(node["Resources"]), dict(node.get("Labels", {})))
        for node in nodes
        if node["Alive"]
    ]


def is_offered(tier: RoleTier, node: NodeOffer) -> bool:
    """Return whether a node is of this tier, busy or not."""
    return all(
        node.resources.get(name, 0) >= amount for name, amount in tier.resources.items()
    ) and all(node.labels.get(name) == value for name, value in tier.labels.items())


def role_tiers(settings: Settings, gpu: bool) -> dict[str, RoleTier]:
    """Return the tiers of the roles that have engines, decoders first."""
    return {name: role_tier(settings, own, gpu) for name, own in reversed(settings.roles)}


def missing(settings: Settings, gpu: bool, nodes: Sequence[NodeOffer]) -> list[str]:
    """Return a sentence for each role whose tier no node offers."""
    absent = []
    each = [
        (own, *found) for own in settings.each.values() for found in role_tiers(own, gpu).items()
    ]
    for own, role, tier in each:
        if not any(is_offered(tier, node) for node in nodes):
            near = difflib.get_close_matches(tier.name, settings.tiers, n=1)
            right = f"start such a node, or set another {role}.tier"
            if near and tier.name not in settings.tiers:
                right = f"did you mean {near[0]}?"
            absent.append(
                own.said(f"{role}.tier: no node offers {tier.name!r} ({described(tier)}); {right}")
            )
    return absent


def described(tier: RoleTier) -> str:
    """Return what a node must have to be of this tier, for people."""
    parts = []
    for name in tier.resources:
        if name.startswith(_ACCELERATOR):
            parts.append(f"accelerator type {name.removeprefix(_ACCELERATOR)}")
        else:
            parts.append(f"custom resource {name}")
    parts += [f"label {name}={value}" for name, value in tier.labels.items()]
    return ", ".join(parts) or "any node"


def inventory(nodes: Sequence[NodeOffer]) -> str:
    """Return what the cluster has, one line for each node, for people."""
    lines = []
    for node in nodes:
        parts = [f"{node.resources.get(kind, 0):g} {kind}" for kind in ("CPU", "GPU")]
        marks = (name for name in node.resources if name.startswith(_ACCELERATOR))
        if types := sorted(name.removeprefix(_ACCELERATOR) for name in marks):
            parts.append("accelerator type " + ", ".join(types))
        if own := sorted(name for name in node.resources if not _is_rays_own(name)):
            parts.append("custom resources " + ", ".join(own))
        labels = {name: value for name, value in node.labels.items() if not _is_rays_own(name)}
        if labels:
            parts.append("labels " + ", ".join(f"{key}={value}" for key, value in labels.items()))
        lines.append(f"node {node.name}: {'; '.join(parts)}")
    return "\n".join(lines) or "no node"


def _is_rays_own(name: str) -> bool:
    own = ("CPU", "GPU", "memory", "object_store_memory")
    return name in own or name.startswith(("node:", "ray.io/", _ACCELERATOR))
