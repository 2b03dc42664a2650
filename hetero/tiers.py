"""Tiers: which nodes a role may run on, how Ray is told, and what to say when there are none.

Pure: what a cluster has comes in as `NodeOffer`, read from ``ray.nodes()`` by `offers`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from conserve.settings import CPU_TIER, GPU_TIER, RoleSettings, Settings, TierSettings
from hetero.power import Cap

# Ray counts a node's kind as a resource of 1: asking for a little of it selects such nodes
# without using it up.
_MARK = 0.001
_ACCELERATOR = "accelerator_type:"


@dataclass(frozen=True, slots=True)
class NodeOffer:
    """A node that is alive, as Ray sees it."""

    name: str
    resources: Mapping[str, float]
    labels: Mapping[str, str]

    @property
    def accelerator_types(self) -> list[str]:
        """Ray's names for its accelerators: ``A40``."""
        marks = (name for name in self.resources if name.startswith(_ACCELERATOR))
        return sorted(name.removeprefix(_ACCELERATOR) for name in marks)

    @property
    def custom_resources(self) -> list[str]:
        """Custom resources that the operator gave it."""
        return sorted(name for name in self.resources if not _is_rays_own(name))


@dataclass(frozen=True, slots=True)
class RoleTier:
    """The tier that a role runs on.

    Attributes:
        name: as in the settings; ``cpu`` without a GPU, ``gpu`` where the role names none.
        resources: what each worker asks Ray for, to be on one of its nodes.
        labels: the node labels that Ray's selector is to match.
        cap: the power cap of its GPUs; None: they are left alone.
        sm_slots: the tenths of a GPU's SMs that each engine leases; None: it runs on all.
    """

    name: str
    resources: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    cap: Cap | None = None
    sm_slots: int | None = None


def role_tier(settings: Settings, own: RoleSettings, gpu: bool) -> RoleTier:
    """Return where a role runs, and how.

    Without GPUs there are no kinds of them, nothing to cap and no SMs: what remains of a tier is
    the custom resource and the labels, and if there are none, it is the tier ``cpu``.
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
    return RoleTier(own.tier, resources, dict(tier.labels), _cap(tier), tier.sm_slots)


def _cap(tier: TierSettings) -> Cap | None:
    if tier.power_cap_w is None and tier.power_cap_fraction is None:
        return None
    return Cap(tier.power_cap_w, tier.power_cap_fraction)


def offers(nodes: Iterable[Mapping[str, Any]]) -> list[NodeOffer]:
    """The nodes that are alive.

    Args:
        nodes: what ``ray.nodes()`` returns.
    """
    return [
        NodeOffer(node["NodeManagerAddress"], dict(node["Resources"]), dict(node.get("Labels", {})))
        for node in nodes
        if node["Alive"]
    ]


def is_offered(tier: RoleTier, node: NodeOffer) -> bool:
    """Whether a node is of this tier, busy or not."""
    return all(
        node.resources.get(name, 0) >= amount for name, amount in tier.resources.items()
    ) and all(node.labels.get(name) == value for name, value in tier.labels.items())


def missing(settings: Settings, gpu: bool, nodes: Sequence[NodeOffer]) -> list[str]:
    """A sentence for each role whose tier no node offers; none if all can be placed."""
    roles = [("decoders", settings.decoders)]
    if settings.prefiller_replicas:
        roles.append(("prefillers", settings.prefillers))
    absent = []
    for role, own in roles:
        tier = role_tier(settings, own, gpu)
        if not any(is_offered(tier, node) for node in nodes):
            absent.append(f"{role}.tier: no node offers {tier.name!r} ({described(tier)})")
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
    """Return what the cluster has, one line a node, for people."""
    lines = []
    for node in nodes:
        parts = [f"{node.resources.get(kind, 0):g} {kind}" for kind in ("CPU", "GPU")]
        if node.accelerator_types:
            parts.append("accelerator type " + ", ".join(node.accelerator_types))
        if node.custom_resources:
            parts.append("custom resources " + ", ".join(node.custom_resources))
        labels = {name: value for name, value in node.labels.items() if not _is_rays_own(name)}
        if labels:
            parts.append("labels " + ", ".join(f"{key}={value}" for key, value in labels.items()))
        lines.append(f"node {node.name}: {'; '.join(parts)}")
    return "\n".join(lines) or "no node"


def _is_rays_own(name: str) -> bool:
    own = ("CPU", "GPU", "memory", "object_store_memory")
    return name in own or name.startswith(("node:", "ray.io/", _ACCELERATOR))
