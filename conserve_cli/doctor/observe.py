"""Observes this node for ``conserve doctor``; `verdict` and `machine` judge it."""

import contextlib
import dataclasses
import glob
import importlib.metadata
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import psutil

from conserve.addons import offered
from conserve.engines import allocator_environment
from conserve.loopback import is_loopback
from conserve.settings import Settings
from conserve_cli.doctor.compiler import observe_compiler
from conserve_cli.doctor.facts import (
    CardFacts,
    Finding,
    GpuFacts,
    HolderFacts,
    ListenerFacts,
    MachineFacts,
    NodeFacts,
    PortFacts,
    SoftwareFacts,
    TorchFacts,
)
from conserve_cli.doctor.machine import ENGINES, KV_LAYOUT, PACKAGES
from deployments.engine.engine_kernels import find_nvcc
from deployments.node.lmcache_server import SERVER_MODULE, is_free, sockets
from hetero.container import cpu_dtype, host_memory, usable_cpus
from hetero.nvml import Gpu, MigDevice, NoDriver, Nvml, NvmlError

# Distributions whose requirements are compared with what is installed.
_REQUIRING = ("conserve", *ENGINES, "lmcache")


def observe_node(settings: Settings, router_here: bool = True) -> NodeFacts:
    """Observe this node, within seconds; ``router_here`` if the router listens on it."""
    software, gpus = observe_software(), observe_gpus()
    if gpus.devices and "torch" in software.packages:
        torch = observe_torch()
        if torch.cuda and not torch.problem:
            torch = dataclasses.replace(torch, ipc=observe_ipc(), nvcc=observe_nvcc())
        software = dataclasses.replace(software, torch=torch)
    return NodeFacts(
        software=software,
        machine=observe_machine(),
        gpus=gpus,
        compiler=observe_compiler(os.environ),
        ports=tuple(observe_ports(settings, router_here)),
        listeners=tuple(observe_listeners()),
        of_addons=tuple(observe_addons(settings)),
    )


def observe_software() -> SoftwareFacts:
    installed: dict[str, importlib.metadata.Distribution] = {}
    for name in PACKAGES:
        try:
            installed[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return SoftwareFacts(
        python=platform.python_version(),
        packages={name: found.version for name, found in installed.items()},
        requires={
            name: tuple(installed[name].requires or ()) for name in _REQUIRING if name in installed
        },
        string_hash=_string_hash(),
    )


def _string_hash() -> int:
    """Return a string's hash in a new process, as the hash seed takes effect when Python starts."""
    command = [sys.executable, "-S", "-c", "print(hash('conserve'))"]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, check=True, timeout=60)
    return int(done.stdout)


def observe_machine() -> MachineFacts:
    memory = host_memory()
    folders = {
        "models": Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser(),
        "Ray": Path(os.environ.get("RAY_TMPDIR", tempfile.gettempdir())),
    }
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MachineFacts(
        memory_total_bytes=memory.total_bytes,
        memory_available_bytes=memory.available_bytes,
        shm_total_bytes=shutil.disk_usage("/dev/shm").total,
        disk={
            purpose: (str(folder), shutil.disk_usage(_existing(folder)).free)
            for purpose, folder in folders.items()
        },
        transparent_huge_pages=_transparent_huge_pages(),
        open_files=soft,
        memory_limited=memory.limited,
        cpus=usable_cpus(),
        dtype=cpu_dtype(),
        lockable_bytes=_lockable_bytes(),
        rdma=bool(glob.glob("/dev/infiniband/uverbs*")),
        sockets=len(sockets()),
        expandable=tuple(allocator_environment(os.environ)),
        open_token=_open_token(),
        kv_layout=os.environ.get(KV_LAYOUT, ""),
        architecture=platform.machine(),
    )


def _open_token() -> str:
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", Path.home() / ".ray" / "auth_token"))
    with contextlib.suppress(OSError):
        if file.stat().st_mode & 0o077:
            return str(file)
    return ""


def _lockable_bytes() -> int | None:
    # LMCache's server raises its limit to the hard one, and CAP_IPC_LOCK has no limit.
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = hard == resource.RLIM_INFINITY or has_capability(CAP_IPC_LOCK)
    return None if unlimited else hard


def _existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def _transparent_huge_pages() -> str:
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not path.exists():
        return ""
    # "always [madvise] never"
    _, _, chosen = path.read_text().partition("[")
    return chosen.partition("]")[0]


def observe_ports(settings: Settings, router_here: bool = True) -> list[PortFacts]:
    """Return the ports that the settings name, except 0, and their holders."""
    lmcache = settings.lmcache
    # On several nodes LMCache listens on its node's address.
    host = "0.0.0.0" if settings.nodes == "several" else "127.0.0.1"
    wanted = [
        ("lmcache.port", "LMCache", host, lmcache.port),
        ("lmcache.port", "LMCache's admin interface", "127.0.0.1", lmcache.http_port),
    ]
    if router_here:
        wanted.insert(0, ("port", "router", settings.host, settings.port))
    return [_port(*one) for one in wanted if one[3]]


def _port(setting: str, purpose: str, host: str, port: int) -> PortFacts:
    if is_free(host, port):
        return PortFacts(setting, purpose, host, port, free=True)
    holder, ours = _holder(port)
    return PortFacts(setting, purpose, host, port, False, holder, ours)


def _holder(port: int) -> tuple[str, bool]:
    """Return the process that listens there, if visible, and whether it is ConServe's."""
    try:
        connections = psutil.net_connections("tcp")
    except psutil.AccessDenied:
        return "", False
    for connection in connections:
        if connection.status != psutil.CONN_LISTEN or connection.laddr.port != port:
            continue
        if connection.pid is None:
            break
        try:
            command = psutil.Process(connection.pid).cmdline() or [""]
        except psutil.Error:
            break
        return f"{Path(command[0]).name} (pid {connection.pid})", is_ours(" ".join(command))
    return "", False


def is_ours(command_line: str) -> bool:
    """Return whether a listening process is ConServe's router or LMCache server."""
    return "ray::ServeReplica:" in command_line or f"-m {SERVER_MODULE} server " in command_line


# --- GPUs -----------------------------------------------------------------------------------------


_CAP_SYS_ADMIN = 21
CAP_IPC_LOCK = 14
# A first import from a slow disk takes long.
_TORCH_TIMEOUT_S = 180.0

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


def observe_gpus() -> GpuFacts:
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
        return ()  # Some drivers show no processes.
    return tuple(_gpu_holder(one.pid, one.memory_bytes) for one in found)


def _gpu_holder(pid: int, memory_bytes: int | None) -> HolderFacts:
    try:
        command = " ".join(psutil.Process(pid).cmdline()).strip()
    except psutil.Error:
        command = ""
    if not command:
        return HolderFacts(pid, "", memory_bytes)
    return HolderFacts(pid, process_name(command), memory_bytes, owner_of(command))


def observe_torch() -> TorchFacts:
    """Ask the installed PyTorch for its build, in a process of its own."""
    environment = {**os.environ, "LMCACHE_DISABLE_BANNER": "1", "LMCACHE_TRACK_USAGE": "false"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK_TORCH], env=environment, capture_output=True, text=True,
            check=True, timeout=_TORCH_TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return TorchFacts(problem=f"its import has not ended within {_TORCH_TIMEOUT_S:g} s")
    except subprocess.CalledProcessError as error:
        # A library of the wrong kind kills the process.
        return TorchFacts(problem=f"its import ended the process, with status {error.returncode}")
    said = json.loads(done.stdout.splitlines()[-1])
    problem = said.get("error", "")
    if "cuda" not in said:
        return TorchFacts(problem=problem)
    major, _, minor = (said["cuda"] or "").partition(".")
    return TorchFacts("", (int(major), int(minor)) if major else None, problem)


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


def observe_ipc() -> str:
    """Try CUDA IPC of memory and of an event; return why it fails, or nothing."""
    command = [sys.executable, "-c", _TRY_IPC, _READ_IPC]
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": _TORCH_TIMEOUT_S}
    try:
        subprocess.run(command, check=True, **options)
    except subprocess.TimeoutExpired:
        return f"it has not ended within {_TORCH_TIMEOUT_S:g} s"
    except subprocess.CalledProcessError as error:
        said = re.search(r"^[\w.]*Error.*", error.stderr, re.MULTILINE)
        return said[0] if said else f"status {error.returncode}"
    return ""


def observe_nvcc() -> tuple[int, int] | None:
    if (nvcc := find_nvcc(os.environ)) is None:
        return None
    done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"release (\d+)\.(\d+)", done.stdout)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def has_capability(number: int) -> bool:
    """Return whether this process has a capability of Linux (`linux/capability.h`)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> number & 1)
    return False


# --- listeners ------------------------------------------------------------------------------------


# Owners by command line; the first match counts.
_OWNERS = (
    (r"^ray::ServeReplica:[^:]*:Router", "router"),
    (r"^ray::ServeReplica:[^:]*:(decoder|prefiller)", "engine"),
    (r" -m (lmcache\.cli\.main|deployments\.node\.lmcache_main) server ", "LMCache"),
    (r"^VLLM::| -m vllm\.| -m multiprocessing\.\S* .*vllm", "vLLM"),
    (r"^ray::|/ray/core/src/ray/|/ray/(_private|dashboard|autoscaler|util/client)/", "Ray"),
    (r" -m ray\.|bin/(ray|serve) ", "Ray"),
)


def observe_listeners() -> list[ListenerFacts]:
    """Return other visible processes that listen on more than loopback (docs/security.md)."""
    try:
        connections = psutil.net_connections("tcp")
    except psutil.AccessDenied:
        return []
    open_to_others: dict[int, set[tuple[str, int]]] = {}
    for connection in connections:
        listens = connection.status == psutil.CONN_LISTEN and not is_loopback(connection.laddr.ip)
        if listens and connection.pid not in (None, os.getpid()):
            where = (connection.laddr.ip, connection.laddr.port)
            open_to_others.setdefault(connection.pid, set()).add(where)
    found = []
    for pid, addresses in sorted(open_to_others.items()):
        try:
            command = " ".join(psutil.Process(pid).cmdline()).strip()
        except psutil.Error:
            continue
        owner = owner_of(command)
        if owner:
            name = process_name(command)
            found.append(ListenerFacts(owner, name, pid, tuple(sorted(addresses))))
    return found


def owner_of(command_line: str) -> str:
    """Return a process's owner as in `ListenerFacts`; empty for other processes."""
    return next((owner for pattern, owner in _OWNERS if re.search(pattern, command_line)), "")


def process_name(command_line: str) -> str:
    """Return a process's own title, or the program or module that it runs."""
    title, *arguments = command_line.split()
    if "::" in title:
        return title
    if "python" in title.rpartition("/")[2]:
        ran = (one for one in arguments if not one.startswith("-"))
        title = next(ran, title)
    return title.rpartition("/")[2]


# --- add-ons --------------------------------------------------------------------------------------


@runtime_checkable
class Examined(Protocol):
    """An add-on that judges on a node what it has left there."""

    def findings(self, settings: Settings) -> list[Finding]: ...


def observe_addons(settings: Settings) -> list[Finding]:
    """Return what the add-ons that are installed on this node find."""
    addons = [one for one in offered("conserve.addons").values() if isinstance(one, Examined)]
    return [finding for addon in addons for finding in addon.findings(settings)]
