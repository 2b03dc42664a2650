"""Gives an engine on a GPU an environment that its node can serve in.

FlashInfer's sampler and attention, and DeepGEMM, compile kernels with CUDA's compiler ``nvcc``, and
vLLM chooses them because their packages are installed. Without a CUDA toolkit the sampler ends each
engine at its warm-up, attention ends all on Blackwell and, before Hopper, those with KV in FP8, and
DeepGEMM ends those with FP8 weights. So they are switched off.

With ``expandable_segments:True`` for PyTorch's allocator, which many images set, LMCache's server
could not map the engine's KV by CUDA IPC. vLLM refuses one of the variables that set it.

vLLM loads this in each of its processes before it reads the variables, as a plugin of the group
``vllm.general_plugins`` (see pyproject.toml; ``VLLM_PLUGINS`` chooses among plugins).
"""

import importlib
import importlib.util
import logging
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from conserve.engines import allocator_environment
from conserve.versions import version_of

logger = logging.getLogger("vllm.conserve")

_USUAL_CUDA_HOME = "/usr/local/cuda"
# FlashInfer's kernels, compiled, as a package that vLLM does not ask for.
_PREBUILT_FLASHINFER = "flashinfer_jit_cache"


def register() -> None:
    """Set this process's environment if its engine runs on an NVIDIA GPU; repeatable."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return
    allocator = allocator_environment(os.environ)
    # PyTorch reads them when it first allocates.
    os.environ.update(allocator)
    if allocator:
        logger.warning(
            "expandable_segments is switched off in %s: LMCache's server could not map the "
            "engine's KV", " and ".join(allocator),
        )  # fmt: skip
    nvcc, prebuilt = find_nvcc(os.environ) is not None, has_prebuilt_flashinfer()
    chosen = kernel_environment(os.environ, nvcc=nvcc, prebuilt=prebuilt)
    os.environ.update(chosen)
    own = os.environ.get("VLLM_USE_FLASHINFER_SAMPLER") != "0"
    if not (own or nvcc or prebuilt):
        for module in attention_backends():
            # vLLM takes the next backend where one cannot be imported.
            cast(dict[str, Any], sys.modules).setdefault(module, None)
    switches = ", ".join(f"{name}={value}" for name, value in chosen.items() if name != "PATH")
    if switches:
        logger.info("not using kernels that this node would have to compile: %s", switches)


def attention_backends() -> set[str]:
    """Return the modules of vLLM's attention backends whose kernels are FlashInfer's."""
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    found = {
        str(backend.value).rpartition(".")[0]
        for backend in (*AttentionBackendEnum, *MLAPrefillBackendEnum)
        if "FLASHINFER" in backend.name or "TRTLLM" in backend.name
    }
    # Models have modules of their own kernels, which they import themselves.
    return {module for module in found if module.startswith("vllm.v1.attention.")}


def find_nvcc(environment: Mapping[str, str]) -> Path | None:
    """Search for CUDA as PyTorch does; a ``CUDA_HOME`` without a compiler hides one on the path."""
    home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    if not home and (found := shutil.which("nvcc", path=environment.get("PATH", os.defpath))):
        return Path(found)
    nvcc = Path(home or _USUAL_CUDA_HOME) / "bin" / "nvcc"
    return nvcc if os.access(nvcc, os.X_OK) else None


def has_prebuilt_flashinfer() -> bool:
    return importlib.util.find_spec(_PREBUILT_FLASHINFER) is not None


def kernel_environment(
    environment: Mapping[str, str], *, nvcc: bool, prebuilt: bool
) -> dict[str, str]:
    """Return the variables to set; those that the environment has stay as they are.

    ``nvcc`` is whether CUDA's compiler is found, and ``prebuilt`` whether FlashInfer's kernels are
    installed.
    """
    switches = {}
    if not prebuilt:
        # Off with a compiler too: compiling needs nvcc, ninja and c++ of versions that go together.
        switches["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    if not nvcc:
        switches |= {"VLLM_USE_DEEP_GEMM": "0", "VLLM_MOE_USE_DEEP_GEMM": "0"}
    chosen = {name: value for name, value in switches.items() if name not in environment}
    # What was installed with vLLM, `ninja` for one, is not on the path of `.venv/bin/conserve`.
    path = [folder for folder in environment.get("PATH", os.defpath).split(os.pathsep) if folder]
    if (programs := str(Path(sys.executable).parent)) not in path:
        chosen["PATH"] = os.pathsep.join([*path, programs])
    return chosen


def require_cuda_ops() -> None:
    """Refuse a PyTorch with which LMCache's CUDA operations do not load, with a `RuntimeError`.

    LMCache 0.5.6 would only warn, and copy with PyTorch's operations. Then its server announces a
    chunk before its copy is done, so another engine may read half of it.
    """
    try:
        # LMCache's extension is linked to PyTorch's libraries.
        importlib.import_module("torch")
        importlib.import_module("lmcache.cuda_ops")
    except ImportError as error:
        here = version_of("torch") or "(not installed)"
        why = " ".join(str(error).split())
        raise RuntimeError(
            f"LMCache {version_of('lmcache')} cannot load its CUDA operations (lmcache.cuda_ops) "
            f"with PyTorch {here}: {why}. Without them KV may be read before it is written. "
            "Install the PyTorch that vLLM pins, in its CUDA build (requirements-gpu.txt)"
        ) from None
