"""The whole of a machine or a cluster: what is asked of which node, and how it ends."""

import dataclasses

from conserve.settings import load
from conserve_cli.doctor.facts import exit_status
from conserve_cli.doctor.verdict import judge
from tests.unit.conserve_cli.doctor.sound import (
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
