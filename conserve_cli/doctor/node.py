"""Examines one node: its own findings, and the facts by which nodes of a cluster are compared."""

import contextlib
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Protocol

from conserve.addons import INSIDE, TOOLS, addon
from conserve.settings import Settings, SettingsError
from conserve_cli.doctor.compiler import check_compiler
from conserve_cli.doctor.findings import Finding, wrong
from conserve_cli.doctor.gpus import check_gpus, find_driver
from conserve_cli.doctor.listeners import check_listeners, check_ports
from conserve_cli.doctor.machine import check_machine
from conserve_cli.doctor.software import check_software, installed
from hetero.container import cpu_dtype
from hetero.gpu_division import divided
from hetero.gpu_room import Crowd, most_on_node
from hetero.tiers import role_tiers


@dataclass(frozen=True, slots=True)
class Place:
    """A node's place in its cluster; by default it is a machine by itself."""

    name: str = ""  # Its address; empty for a machine by itself.
    is_head: bool = True  # Whether the router listens on it.
    has_engines: bool = True  # Whether engines can be on it.
    several: bool = False  # Whether the cluster has other nodes.
    # This node's GPUs and all nodes', by Ray's account; None: the driver is asked.
    gpus: tuple[float, float] | None = None
    dtype: str | None = None  # The head's, which engines on CPUs compute in; None: this node's.


@dataclass(frozen=True, slots=True)
class Comparable:
    """The facts by which nodes are compared."""

    name: str
    versions: dict[str, str]  # Of Python, of installed packages, and whether conserve_inside is.
    unreachable: tuple[str, ...] = ()  # Nodes that it cannot open a TCP connection to.


@dataclass(frozen=True, slots=True)
class NodeReport:
    findings: list[Finding]
    facts: Comparable


def examine_node(settings: Settings, place: Place) -> NodeReport:
    """Examine this node, within seconds."""
    versions = {"Python": platform.python_version()}
    versions |= {name: found.version for name, found in installed().items()}
    # Engines need it wherever they are; the other add-ons do not.
    if find_spec(INSIDE) is not None:
        versions[INSIDE] = "installed"
    facts = Comparable(place.name, versions)
    findings = [replace(finding, node=place.name) for finding in check_node(settings, place)]
    return NodeReport(findings, facts)


def check_node(settings: Settings, place: Place | None = None) -> Iterator[Finding]:
    place = place or Place()
    several = place.several or settings.nodes == "several"
    driver = find_driver()
    on_cpu = settings.device == "cpu" or not driver.has_devices
    tiers = [role_tiers(own, gpu=True) for own in settings.each.values()]
    caps = any(tier.cap for some in tiers for tier in some.values())
    yield from check_gpus(driver, settings, caps, place.has_engines)
    yield from check_software(driver, several, place.has_engines)
    crowd = dtype = None
    if place.has_engines and on_cpu:
        dtype = place.dtype or cpu_dtype()[0]
    elif place.has_engines:
        yield from check_compiler(os.environ)
        crowd = _crowd(settings, *(place.gpus or (driver.gpus, driver.gpus)))
    each = settings.each.values()
    engines = sum(own.prefiller_replicas + own.decoders.replicas for own in each)
    yield from check_machine(
        settings,
        # Which of several nodes has an engine is not known beforehand.
        engines if on_cpu and not several else 0,
        has_engines=place.has_engines,
        crowd=crowd,
        several=several,
        dtype=dtype,
    )
    yield from check_ports(settings, place.is_head)
    yield from check_addons(settings)
    if not several:
        yield from check_listeners(settings)


class Examined(Protocol):
    """The add-on `conserve_tools`, which judges what it has left on a node."""

    def findings(self, settings: Settings) -> list[Finding]: ...


def check_addons(settings: Settings) -> list[Finding]:
    """Return the add-on's findings; none where it is not installed."""
    try:
        tools: Examined | None = addon(TOOLS)
        return [] if tools is None else tools.findings(settings)
    except Exception as error:
        # What the other checks have found is still told.
        return [wrong(TOOLS, f"cannot be examined: {error!r}", "install conserve anew")]


def _crowd(settings: Settings, here: float, everywhere: float) -> Crowd:
    """Return the most engines on a node, of as many as all nodes' GPUs would get."""
    # Starting the application reports settings that do not go together.
    with contextlib.suppress(SettingsError):
        settings = divided(settings, int(everywhere), {})
    return most_on_node(settings, here)
