"""Observes this node's GPUs, and what PyTorch here can do with them."""

import glob
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil

from conserve_cli.doctor.facts import CardFacts, GpuFacts, HolderFacts, TorchFacts
from conserve_cli.doctor.listeners import owner_of, process_name
from hetero.nvml import Gpu, MigDevice, NoDriver, Nvml, NvmlError

_CAP_SYS_ADMIN = 21
CAP_IPC_LOCK = 14
# A first import from a slow disk.
_TORCH_TIMEOUT_S = 180.0

# LMCache takes the operations of `lmcache.cuda_ops` if it can be imported, and PyTorch's own if not
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


def observe_gpus() -> GpuFacts:
    """Ask the NVIDIA driver, if there is one."""
    devices = bool(glob.glob("/dev/nvidia[0-9]*"))
    try:
        with Nvml() as nvml:
            return GpuFacts(
                devices=True,
                driver=nvml.driver_version(),
                cuda=nvml.cuda_version(),
                cards=tuple(_card(nvml, gpu) for gpu in nvml.inventory()),
                lost=tuple(nvml.lost()),
                may_cap_power=has_capability(_CAP_SYS_ADMIN),
            )
    except NoDriver as error:
        return GpuFacts(devices, problem=str(error) if devices else "")
    except NvmlError as error:
        return GpuFacts(devices=True, problem=str(error))


def _card(nvml: Nvml, gpu: Gpu) -> CardFacts:
    label = f"GPU {gpu.index}"
    if not gpu.mig_enabled:
        return _seen(nvml, label, gpu)
    parts = tuple(
        _seen(nvml, f"MIG device {number} of {label}", part)
        for number, part in enumerate(gpu.mig_devices)
    )
    free_bytes = sum(part.free_bytes for part in parts)
    return CardFacts(label, gpu.name, gpu.memory_bytes, free_bytes, mig=True, parts=parts)


def _seen(nvml: Nvml, label: str, one: Gpu | MigDevice) -> CardFacts:
    free_bytes, holders = nvml.memory_free_bytes(one.uuid), _holders(nvml, one.uuid)
    return CardFacts(label, one.name, one.memory_bytes, free_bytes, holders)


def _holders(nvml: Nvml, uuid: str) -> tuple[HolderFacts, ...]:
    try:
        found = nvml.processes(uuid)
    except NvmlError:
        return ()  # A driver that shows nobody; how much is free it has said.
    return tuple(_holder(one.pid, one.memory_bytes) for one in found)


def _holder(pid: int, memory_bytes: int | None) -> HolderFacts:
    try:
        command = " ".join(psutil.Process(pid).cmdline()).strip()
    except psutil.Error:
        command = ""
    if not command:
        return HolderFacts(pid, "", memory_bytes)
    return HolderFacts(pid, process_name(command), memory_bytes, owner_of(command))


def observe_torch() -> TorchFacts:
    """Ask the PyTorch that is installed here what it is built for, in a process of its own."""
    environment = {**os.environ, "LMCACHE_DISABLE_BANNER": "1", "LMCACHE_TRACK_USAGE": "false"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK_TORCH], env=environment, capture_output=True, text=True,
            check=True, timeout=_TORCH_TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return TorchFacts(problem=f"its import has not ended within {_TORCH_TIMEOUT_S:g} s")
    except subprocess.CalledProcessError as error:
        # Killed, by a library of the wrong kind.
        return TorchFacts(problem=f"its import ended the process, with status {error.returncode}")
    said = json.loads(done.stdout.splitlines()[-1])
    problem = said.get("error", "")
    if "cuda" not in said:
        return TorchFacts(problem=problem)
    major, _, minor = (said["cuda"] or "").partition(".")
    return TorchFacts("", (int(major), int(minor)) if major else None, problem)


def has_capability(number: int) -> bool:
    """Whether this process has a capability of Linux's (`linux/capability.h`)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> number & 1)
    return False
