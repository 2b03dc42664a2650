"""Reads what memory and CPUs this process may use, with its container's limits.

Linux keeps the limits in nested control groups (cgroups), where the lowest limit counts. psutil
reports the machine's own figures, and Ray and vLLM read only the topmost group.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

_ROOT = Path("/")
# Flags of CPUs for which oneDNN has kernels for bfloat16. Without them prefills take two to
# three times as long as in float32 with AVX-512, and four to eight times with AVX2.
_BFLOAT16 = {"avx512_bf16": "AVX512-BF16", "amx_bf16": "AMX", "bf16": "Arm's BF16"}
# Values of oneDNN's variable that keep it from those kernels.
_LESS = re.compile(r"sse41|avx|avx2\w*|avx512_core(_vnni)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Memory that this process may have; ``limited`` if less than the machine's."""

    total_bytes: int
    available_bytes: int  # With what dropping the page cache would free.
    limited: bool = False

    def said(self) -> str:
        total, available = self.total_bytes / 2**30, self.available_bytes / 2**30
        whose = "the container's limit of " if self.limited else ""
        return f"{available:.1f} of {whose}{total:.1f} GiB are available"


def host_memory(root: Path = _ROOT) -> HostMemory:
    """Return the memory that this process may have; ``root`` holds ``/proc`` and ``/sys``."""
    machine = psutil.virtual_memory()
    total, available = int(machine.total), int(machine.available)
    for folder in _levels("memory", root):
        limits = [
            limit
            for name in ("memory.max", "memory.high", "memory.limit_in_bytes")
            if (limit := _number(folder / name)) is not None
        ]
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
        for limit in limits:
            total = min(total, limit)
            available = min(available, limit - max(0, used - _page_cache(folder)))
    return HostMemory(total, max(0, available), total < machine.total)


def usable_cpus(root: Path = _ROOT) -> float:
    """Return how many CPUs this process may use, by its affinity and its cgroup quota."""
    cpus = float(len(os.sched_getaffinity(0)))
    for folder in _levels("cpu", root):
        quota = _quota(folder)
        if quota is not None:
            cpus = min(cpus, quota)
    return cpus


def cpu_dtype(root: Path = _ROOT) -> tuple[str, str]:
    """Return the dtype that this machine's CPU has kernels for, and why."""
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "")
    if _LESS.fullmatch(limit):
        return "float32", f"ONEDNN_MAX_CPU_ISA={limit} leaves out the kernels for bfloat16"
    flags = {flag for line in _lines(root / "proc/cpuinfo") for flag in line.split()}
    if has := [name for flag, name in _BFLOAT16.items() if flag in flags]:
        return "bfloat16", f"this CPU has bfloat16 kernels ({' and '.join(has)})"
    return "float32", "this CPU has no bfloat16 kernels (neither AVX512-BF16 nor AMX)"


def _quota(folder: Path) -> float | None:
    """Return the CPUs that a control group may use; None: no limit."""
    with contextlib.suppress(OSError, ValueError):
        # "200000 100000", or "max 100000": microseconds of CPU time, in microseconds.
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    share = _number(folder / "cpu.cfs_quota_us")
    period_us = _number(folder / "cpu.cfs_period_us")
    return share / period_us if share and share > 0 and period_us else None


def _levels(controller: str, root: Path) -> Iterator[Path]:
    """Yield the folders of this process's control group and its parents, for cgroups v1 and v2.

    If both versions are mounted, only one has the files of a given controller.
    """
    mounts = list(_mounts(root))
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        for kind, options, above, mounted in mounts:
            if controllers and (kind != "cgroup" or controller not in options):
                continue
            if not controllers and kind != "cgroup2":
                continue
            folder = top = root / mounted.lstrip("/")
            # A container may see its own group as the topmost, under the host's path or another.
            if path == above or path.startswith(above.rstrip("/") + "/"):
                inner = folder / path[len(above.rstrip("/")) :].lstrip("/")
                folder = inner if ".." not in inner.parts and inner.is_dir() else top
            yield folder
            while folder != top:
                folder = folder.parent
                yield folder


def _mounts(root: Path) -> Iterator[tuple[str, list[str], str, str]]:
    for line in _lines(root / "proc/self/mountinfo"):
        fields, _, rest = line.partition(" - ")
        kind, *others = rest.split()
        if kind in ("cgroup", "cgroup2"):
            _, _, _, above, mounted, *_ = fields.split()
            yield kind, others[-1].split(","), _unescaped(above), _unescaped(mounted)


def _unescaped(path: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), path)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    """Return the number in a file; None if there is no file or it says ``max``."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _page_cache(folder: Path) -> int:
    counted = dict(line.split(" ", 1) for line in _lines(folder / "memory.stat") if " " in line)
    names = ("active_file", "inactive_file")
    # Version 1 reports the totals with the groups below separately.
    prefix = "total_" if "total_active_file" in counted else ""
    return sum(int(counted.get(prefix + name, 0)) for name in names)
