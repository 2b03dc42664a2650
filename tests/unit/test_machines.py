"""The options `--cpu` and `--no-compiler` make this machine look like another one."""

import os
import shutil
import subprocess
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import machines
from tests.checkout import ROOT

# The kernels that vLLM loads, and those that it picks for attention, by the view of the CPU.
_CHOICES = {
    "avx2": ("vllm._C_AVX2", "vec"),
    "avx512": ("vllm._C_AVX512", "vec"),
    "bf16": ("vllm._C", "vec"),
    "amx": ("vllm._C", "amx"),
}


class _Noting(MetaPathFinder):
    """Notes which kernels vLLM asks for, and has none."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name in machines.KERNELS:
            self.asked.append(name)
            raise ImportError("dynamic module does not define module export function")


@pytest.fixture
def view(pytestconfig: pytest.Config) -> str:
    """The view that was asked for, or else that of this CPU, by the kernel's account."""
    if pytestconfig.option.cpu:
        return str(pytestconfig.option.cpu)
    text = Path("/proc/cpuinfo").read_text()
    flags = set(text.partition("flags")[2].partition("\n")[0].split())
    named = {"amx": "amx_tile", "bf16": "avx512_bf16", "avx512": "avx512f"}
    return next((name for name, flag in named.items() if flag in flags), "avx2")


def test_vllm_decides_by_the_view(view: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    noting = _Noting()
    for name in machines.KERNELS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [noting, *sys.meta_path])
    CpuPlatform.import_kernels()
    assert (*noting.asked, _get_attn_isa(torch.bfloat16, 32)) == _CHOICES[view]


def test_a_process_of_a_test_has_the_same_view() -> None:
    code = "import torch; print(sorted(torch.cpu.get_capabilities().items()))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(sorted(torch.cpu.get_capabilities().items()))


def test_compilers_are_hidden_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Path(sys.executable).parent
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}:{own}")
    monkeypatch.setenv("CC", "gcc")
    folder = machines.hide_compilers()
    try:
        assert os.environ["PATH"] == str(folder)
        assert not os.environ["CC"]
        compilers = ("cc", "gcc", "g++", "clang", "ld", "ninja")
        assert [name for name in compilers if shutil.which(name)] == []
        assert all(shutil.which(name) for name in ("env", "sh", "pytest"))
    finally:
        shutil.rmtree(folder)
