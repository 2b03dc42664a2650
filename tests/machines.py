"""Other machines than this one: CPUs with other instructions, and no compiler.

The Python code of vLLM and PyTorch asks `torch.cpu.get_capabilities` for the CPU's instructions.
`pytest --cpu=avx2` replaces that function before it is first called, in pytest's process and in
those that tests start. Of native code, oneDNN is kept to them by its own variable, as far as the
CPU has them; PyTorch's asks the CPU itself. vLLM's is in a library for each kind of CPU, and its
Python code loads one of them: none is loaded if the view has instructions that the CPU lacks.
"""

import os
import re
import sys
from collections.abc import Callable, Mapping
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from tests.at_start import FOLDER

VARIABLE = "CONSERVE_TEST_CPU"
# The names are PyTorch's. Each view is that of a real CPU: Haswell, Skylake-SP, Cooper Lake and
# Sapphire Rapids.
_AVX512 = frozenset({"avx512_f", "avx512_cd", "avx512_dq", "avx512_bw", "avx512_vl"})
_BF16 = _AVX512 | {"avx512_vnni", "avx512_bf16"}
_AMX = _BF16 | {"avx512_fp16", "amx_tile", "amx_int8", "amx_bf16"}
VIEWS = {"avx2": frozenset[str](), "avx512": _AVX512, "bf16": _BF16, "amx": _AMX}
# How oneDNN, which is native code, is kept to them; the last one's it has where the CPU does.
_ISAS = {"avx2": "AVX2", "avx512": "AVX512_CORE", "bf16": "AVX512_CORE_BF16", "amx": "DEFAULT"}
# vLLM's kernels, by the CPUs that they are for.
KERNELS = ("vllm._C_AVX2", "vllm._C_AVX512", "vllm._C")
_COMPILERS = ("cc", "c++", "c89", "c99", "gcc", "g++", "cpp", "clang", "clang++", "nvcc", "tcc")
_TOOLS = ("ar", "as", "cmake", "gold", "ld", "lld", "ninja", "nm", "objcopy", "ranlib", "strip")


def view_cpu(view: str) -> None:
    """Have this process, and those that it starts, take the CPU for one of this view."""
    os.environ |= {VARIABLE: view, "ONEDNN_MAX_CPU_ISA": _ISAS[view]}
    search = os.environ.get("PYTHONPATH")
    if str(FOLDER) not in (search or "").split(":"):
        os.environ["PYTHONPATH"] = ":".join([str(FOLDER), *([search] if search else [])])
    view_cpu_here(view)


def view_cpu_here(view: str) -> None:
    """Have this process take the CPU for one of this view, as PyTorch is imported."""
    if "torch.cpu" in sys.modules:
        raise RuntimeError("PyTorch is imported already, and may have looked at the CPU")
    sys.meta_path.insert(0, _Replacing(VIEWS[view]))


class _Replacing(MetaPathFinder):
    """Imports `torch.cpu`, and replaces what it says."""

    def __init__(self, has: frozenset[str]) -> None:
        self._has = has

    def find_spec(
        self, name: str, path: Any = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch.cpu":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute: Callable[[ModuleType], None] = spec.loader.exec_module

        def replaced(module: ModuleType) -> None:
            execute(module)
            self._replace(module)

        spec.loader.exec_module = replaced  # type: ignore[method-assign]
        return spec

    def _replace(self, cpu: Any) -> None:
        real: Mapping[str, Any] = cpu.get_capabilities()
        kinds = ("avx512", "avx10", "amx")
        view = {name: value for name, value in real.items() if not name.startswith(kinds)}
        view |= dict.fromkeys((name for name in real if name.startswith(kinds)), False)
        view |= dict.fromkeys(self._has, True)
        if any(not real.get(name) for name in self._has):
            # Python raises ImportError for these: vLLM says so in its log, and goes on.
            sys.modules |= dict.fromkeys(KERNELS)
        proxy = MappingProxyType(view)
        cpu.get_capabilities = lambda: proxy


def require_kernels() -> None:
    """Skip a test that runs vLLM's kernels, where the view has more than the CPU."""
    import pytest

    if any(sys.modules.get(name, True) is None for name in KERNELS):
        pytest.skip("this CPU lacks instructions that vLLM's kernels for --cpu would run")


def hide_compilers() -> Path:
    """Leave all programs on PATH but compilers and their tools; return the new folder."""
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="without-compilers-"))
    os.environ |= environment_without_compilers(folder)
    return folder


def environment_without_compilers(folder: Path) -> dict[str, str]:
    """Return variables that leave processes no compiler.

    Args:
        folder: gets links to all programs on PATH but compilers and their tools.
    """
    import shutil

    for search in os.environ["PATH"].split(":"):
        if not os.path.isdir(search):
            continue
        for program in os.scandir(search):
            link = folder / program.name
            if not _is_compiler(program.name) and not link.is_symlink():
                link.symlink_to(os.path.join(os.path.abspath(search), program.name))
    assert not any(shutil.which(name, path=str(folder)) for name in (*_COMPILERS, *_TOOLS))
    return {"PATH": str(folder), "CC": "", "CXX": ""}


def _is_compiler(program: str) -> bool:
    # Debian has names such as x86_64-linux-gnu-gcc-12, gcc-ar-12 and ld.bfd.
    parts = re.split(r"[-.]", re.sub(r"-[\d.]+$", "", program))
    return parts[-1] in (*_COMPILERS, *_TOOLS) or parts[:2] in (["ld", "bfd"], ["ld", "gold"])
