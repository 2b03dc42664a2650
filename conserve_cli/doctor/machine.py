"""Checks a node's memory, disks, CPUs and limits, as its container has them."""

import contextlib
import glob
import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

from autoscale.capacity.served import profile_off
from conserve.settings import Settings
from conserve_cli.doctor.findings import Finding, gibibytes, note, ok, warning, wrong
from hetero.container import cpu_dtype, host_memory, usable_cpus
from hetero.gpu_room import Crowd
from hetero.host_memory import capped_gb

# Memory of an engine on a CPU beside its KV, for vLLM, PyTorch and a small model. Measured: one
# prefiller, two decoders and Ray took 14 GB, with 1 GiB of KV each.
_CPU_ENGINE_BYTES = 4 * 2**30
# For Ray's object store and an engine's workers; containers get 64 MiB by default.
_LEAST_SHM_BYTES = 2**30
_LEAST_DISK_BYTES = 2 * 2**30
# File systems in memory, or on a network, which hang with it.
_NO_DISKS = ("tmpfs", "ramfs", "nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre")
# A core has two hyperthreads, which machines and containers count as CPUs.
_VCPUS = 2
_KV_LAYOUT = "VLLM_KV_CACHE_LAYOUT"
# Layouts in which a block is in pieces, a head each.
_UNMOVABLE = ("LHBNC", "BHLNC")
# Each client, turn and worker takes some files.
_LEAST_OPEN_FILES = 4096
_CAP_IPC_LOCK = 14


def check_machine(
    settings: Settings,
    cpu_engines: int,
    *,
    has_engines: bool = True,
    crowd: Crowd | None = None,
    several: bool = False,
    dtype: str | None = None,
) -> Iterator[Finding]:
    """Check whether this machine has what ConServe needs.

    Args:
        cpu_engines: how many engines run here on the CPU.
        has_engines: whether any engine, and so an LMCache server, can be here.
        crowd: the engines that may be on its GPUs; None: none.
        several: whether KV moves between this node and others.
        dtype: of engines on its CPU, unless one is set; None: it has none.
    """
    if has_engines:
        yield _memory(settings, cpu_engines)
    yield _shared_memory(crowd)
    yield from _disk()
    if has_engines and settings.lmcache.disk.path is not None:
        yield _kv_disk(Path(settings.lmcache.disk.path), settings.lmcache.disk.size_gb)
    yield _open_files()
    if dtype:
        yield _dtype(settings, dtype)
    yield from _open_token()
    if crowd:
        yield _cpus(crowd)
        yield from _kv_layout()
    if several and has_engines and glob.glob("/dev/infiniband/uverbs*"):
        yield _locked_memory(settings)


def _memory(settings: Settings, cpu_engines: int) -> Finding:
    memory = host_memory()
    size_gb = settings.lmcache.size_gb
    if "size_gb" not in settings.lmcache.model_fields_set:
        size_gb = capped_gb(size_gb, memory.available_bytes)
    needed = size_gb * 2**30 + cpu_engines * _CPU_ENGINE_BYTES
    for_what = f"{size_gb:g} GiB for LMCache"
    if cpu_engines:
        for_what += f" and about 4 GiB for each of {cpu_engines} engines on the CPU"
    limit = "the container's limit of " if memory.limited else ""
    available = gibibytes(memory.available_bytes)
    seen = f"{available} of {limit}{gibibytes(memory.total_bytes)} available"
    if memory.available_bytes >= needed:
        return ok("memory", seen)
    to_do = "free some, or set a smaller lmcache.size_gb or fewer engines"
    to_do += ", or give the container more" if memory.limited else ""
    never = memory.total_bytes < needed
    seen = f"{seen}; {gibibytes(needed)} are needed ({for_what})"
    return Finding("wrong" if never else "warning", "memory", seen, to_do)


def _shared_memory(crowd: Crowd | None) -> Finding:
    size_bytes = shutil.disk_usage("/dev/shm").total
    size = gibibytes(size_bytes)
    if size_bytes >= _LEAST_SHM_BYTES:
        return ok("shared memory", f"/dev/shm has {size}")
    needs = "Ray and engines need 1 GiB at least"
    if crowd is not None and crowd.workers > crowd.engines:
        needs = "Ray, and NCCL between an engine's workers, need 1 GiB at least"
    return wrong(
        "shared memory",
        f"/dev/shm has {size}; {needs}",
        "give the container more: docker run --shm-size=8g, or a memory-backed volume on /dev/shm; "
        "else start Ray on it by `conserve serve`, or with --object-store-memory=83886080",
    )


def _disk() -> Iterator[Finding]:
    for purpose, folder in (
        ("models", Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()),
        ("Ray", Path(os.environ.get("RAY_TMPDIR", tempfile.gettempdir()))),
    ):
        free = shutil.disk_usage(_existing(folder)).free
        if free >= _LEAST_DISK_BYTES:
            yield ok("disk", f"{gibibytes(free)} free for {purpose}")
        else:
            yield wrong(
                "disk",
                f"{gibibytes(free)} free in {folder}, for {purpose}",
                "make room, 2 GiB at least; Ray stops placing work on a disk 95 % full",
            )


def _kv_disk(path: Path, size_gb: float) -> Finding:
    folder = _existing(path)
    mounts = {Path(one.mountpoint): one.fstype for one in psutil.disk_partitions(all=True)}
    kind = next((mounts[one] for one in (folder, *folder.parents) if one in mounts), "unknown")
    free = shutil.disk_usage(folder).free
    seen = f"{gibibytes(free)} free in {folder} ({kind}), for KV"
    what_to_do = "set lmcache.disk.path to a disk of the node's, or size_gb there to what is free"
    if not os.access(folder, os.W_OK):
        return wrong("disk", f"{seen}; this user may not write there", what_to_do)
    if kind in _NO_DISKS:
        return wrong("disk", f"{seen}, which is no disk of this node's", what_to_do)
    few = free < size_gb * 2**30
    return warning("disk", f"{seen}, not {size_gb:g} GiB", what_to_do) if few else ok("disk", seen)


def _existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def _open_files() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    seen = f"a process may have {soft} open"
    if soft >= _LEAST_OPEN_FILES:
        return ok("files", seen)
    return warning("files", seen, "ulimit -n 65536 before starting Ray, on every node")


def _dtype(settings: Settings, dtype: str) -> Finding:
    own, why = cpu_dtype()
    served = (settings.engine | settings.decoders.engine).get("dtype", dtype)
    seen = f"engines compute in {served}; {why}"
    if own == "float32" and served not in ("float32", "float"):
        return warning("dtype", seen, "set engine.dtype=float32, unless the model is quantised")
    off = profile_off(settings, own)
    return Finding("warning" if off else "ok", "dtype", seen + off)


def _open_token() -> Iterator[Finding]:
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", Path.home() / ".ray" / "auth_token"))
    with contextlib.suppress(OSError):
        if file.stat().st_mode & 0o077:
            yield warning(
                "token",
                f"other users may read {file}, with which they can have Ray run code",
                f"chmod 600 {file}; if one may have read it, end your Rays, replace it wherever it "
                "is, and start them again",
            )


def _cpus(crowd: Crowd) -> Finding:
    """Compare the CPUs with the processes that poll for their next step."""
    cpus = usable_cpus()
    seen = f"{cpus:.3g} CPUs"
    count = f"{crowd.engines} engines with {crowd.workers} workers on GPUs"
    advised = _VCPUS * crowd.processes
    if cpus < crowd.waiting:
        return warning(
            "CPUs",
            f"{seen}; the cores and workers of {count} are {crowd.waiting} processes, which wait "
            "for each other asleep here, and late for their next step",
            f"give the container {advised} (two hyperthreads for each, and for each engine's "
            "server), or run fewer engines here",
        )
    if cpus < advised:
        return note(
            "CPUs",
            f"{seen}; vLLM advises a core, of two hyperthreads, for each of {crowd.processes} "
            f"processes of {count}",
            f"{advised} CPUs, if time between tokens matters",
        )
    return ok("CPUs", f"{seen} for {count}")


def _kv_layout() -> Iterator[Finding]:
    layout = os.environ.get(_KV_LAYOUT, "")
    if layout in _UNMOVABLE:
        seen = f"{_KV_LAYOUT}={layout}: LMCache cannot copy KV that lies like that"
        yield wrong("KV layout", seen, f"unset {_KV_LAYOUT}, or set LBNHC, its default")


def _locked_memory(settings: Settings) -> Finding:
    """Check whether a network card with RDMA may lock all of LMCache's memory."""
    needed = settings.lmcache.size_gb * 2**30
    if "size_gb" not in settings.lmcache.model_fields_set:
        # On GPUs the size is chosen by the memory that is free.
        needed = max(needed, 0.5 * host_memory().available_bytes)
    lockable = lockable_bytes()
    if lockable is None or lockable >= needed:
        return ok("locked memory", "as much as LMCache's server shares by RDMA")
    return wrong(
        "locked memory",
        f"a process may lock {gibibytes(lockable)}, and RDMA wants {gibibytes(needed)} of "
        "LMCache's locked: its server does not come up",
        "ulimit -l unlimited before Ray starts, on every node (docker run --ulimit memlock=-1; "
        "systemd: LimitMEMLOCK=infinity); or keep NIXL to TCP: UCX_TLS=tcp",
    )


def lockable_bytes() -> int | None:
    """Return how much memory a process may lock; None: unlimited."""
    # LMCache's server raises its limit to the hard one, and CAP_IPC_LOCK has no limit.
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = hard == resource.RLIM_INFINITY or has_capability(_CAP_IPC_LOCK)
    return None if unlimited else hard


def has_capability(number: int) -> bool:
    """Return whether this process has a capability of Linux (`linux/capability.h`)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> number & 1)
    return False
