"""Reads what this process may have of its machine's memory and CPUs, with its container's limits.

Linux keeps the limits in control groups (cgroups), of which a process is in a nested one; each
level's limit holds, so the least counts. psutil says what the machine has, and Ray and vLLM read
the topmost level alone.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

_ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Memory that processes here may have.

    Attributes:
        total_bytes: the machine's, or the container's limit if that is less.
        available_bytes: what is free of it, or can be freed by dropping files from the page cache.
        limited: whether a limit is less than what the machine has.
    """

    total_bytes: int
    available_bytes: int
    limited: bool = False

    def said(self) -> str:
        """Return it for people."""
        total, available = self.total_bytes / 2**30, self.available_bytes / 2**30
        whose = "the container's limit of " if self.limited else ""
        return f"{available:.1f} of {whose}{total:.1f} GiB are available"


def host_memory(root: Path = _ROOT) -> HostMemory:
    """Return what memory there is for this process, and those that it starts.

    Args:
        root: where ``/proc`` and ``/sys`` are.
    """
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
    """Return how many CPUs this process may use at a time: by its affinity, and by its quota.

    Args:
        root: where ``/proc`` and ``/sys`` are.
    """
    cpus = float(len(os.sched_getaffinity(0)))
    for folder in _levels("cpu", root):
        quota = _quota(folder)
        if quota is not None:
            cpus = min(cpus, quota)
    return cpus


def _quota(folder: Path) -> float | None:
    """CPUs that a control group may use at a time; None: as many as there are."""
    with contextlib.suppress(OSError, ValueError):
        # "200000 100000", or "max 100000": microseconds of CPU time, in microseconds.
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    share = _number(folder / "cpu.cfs_quota_us")
    period_us = _number(folder / "cpu.cfs_period_us")
    return share / period_us if share and share > 0 and period_us else None


def _levels(controller: str, root: Path) -> Iterator[Path]:
    """Yield the folder of this process's control group, and those above it, as far as they show.

    Of either version: with both, a controller is in one of them, and the other has no files of it.
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
            # A container may be shown its own group as the topmost, by the path that the host has
            # for it or by another.
            if path == above or path.startswith(above.rstrip("/") + "/"):
                inner = folder / path[len(above.rstrip("/")) :].lstrip("/")
                folder = inner if ".." not in inner.parts and inner.is_dir() else top
            yield folder
            while folder != top:
                folder = folder.parent
                yield folder


def _mounts(root: Path) -> Iterator[tuple[str, list[str], str, str]]:
    """Yield each mount of control groups: its kind, options, topmost group and place."""
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
    """The number in a file; None if there is none, or ``max``."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _page_cache(folder: Path) -> int:
    """Bytes of files that are in memory, and dropped where it is needed, with groups below."""
    counted = dict(line.split(" ", 1) for line in _lines(folder / "memory.stat") if " " in line)
    names = ("active_file", "inactive_file")
    # The older version counts groups below apart.
    prefix = "total_" if "total_active_file" in counted else ""
    return sum(int(counted.get(prefix + name, 0)) for name in names)
