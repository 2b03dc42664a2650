"""Tiers: whether some node is of each role's, and whether their power caps can be set."""

from collections.abc import Sequence

from conserve.settings import Settings
from conserve_cli.doctor.facts import NodeFacts
from conserve_cli.doctor.findings import Finding
from hetero.tiers import NodeOffer, RoleTier, described, inventory, is_offered, role_tier


def check_tiers(settings: Settings, nodes: Sequence[NodeFacts]) -> list[Finding]:
    """Whether a node of the cluster offers the tier of each role."""
    offered = [NodeOffer(node.name, node.resources, node.labels) for node in nodes]
    findings = []
    for role, tier in role_tiers(settings, runs_on_gpus(settings, nodes)).items():
        found = [node.name for node in offered if is_offered(tier, node)]
        what = f"{tier.name} ({described(tier)})"
        if found:
            findings.append(Finding("ok", "tier", f"{role}: {what} on {', '.join(found)}"))
        else:
            there = inventory(offered).replace("\n", "; ")
            findings.append(
                Finding(
                    "wrong", "tier", f"{role}: no node is of {what}; there are: {there}",
                    f"start such a node (docs/cluster.md, Tiers), or set another {role}.tier",
                )
            )  # fmt: skip
    return findings


def engine_nodes(settings: Settings, nodes: Sequence[NodeFacts]) -> list[NodeFacts]:
    """The nodes on which an engine of these settings can be; all, if there is none such."""
    on_gpu = runs_on_gpus(settings, nodes)
    tiers = role_tiers(settings, on_gpu).values()
    offered = [(node, NodeOffer(node.name, node.resources, node.labels)) for node in nodes]
    found = [
        node
        for node, offer in offered
        if any(is_offered(tier, offer) for tier in tiers)
        and (node.resources.get("GPU") or not on_gpu)
    ]
    return found or list(nodes)


def runs_on_gpus(settings: Settings, nodes: Sequence[NodeFacts]) -> bool:
    """Whether a cluster's engines are on GPUs."""
    return settings.device == "gpu" or (
        settings.device == "auto" and any(node.resources.get("GPU") for node in nodes)
    )


def role_tiers(settings: Settings, on_gpu: bool) -> dict[str, RoleTier]:
    """The tier of each role that has replicas."""
    roles = {"decoders": settings.decoders}
    if settings.prefiller_replicas:
        roles["prefillers"] = settings.prefillers
    return {role: role_tier(settings, own, on_gpu) for role, own in roles.items()}
