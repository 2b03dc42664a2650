"""All checks on all that was observed."""

import dataclasses
from collections.abc import Sequence

from conserve.settings import Settings, SettingsError
from conserve_cli.doctor.cluster import check_nodes
from conserve_cli.doctor.compiler import check_compiler
from conserve_cli.doctor.environments import check_environments
from conserve_cli.doctor.facts import NodeFacts
from conserve_cli.doctor.findings import Finding
from conserve_cli.doctor.gpus import check_gpus
from conserve_cli.doctor.listeners import check_listeners
from conserve_cli.doctor.machine import check_machine
from conserve_cli.doctor.ports import check_ports
from conserve_cli.doctor.software import check_software
from conserve_cli.doctor.tiers import check_tiers, engine_nodes, role_tiers
from hetero.gpu_layout import with_counts
from hetero.gpu_room import most_on_node


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
