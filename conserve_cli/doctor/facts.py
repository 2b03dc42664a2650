"""The facts that are observed of a node, and the findings, as plain data for other nodes."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal


@dataclass(frozen=True, slots=True)
class TorchFacts:
    """PyTorch, as imported in a process of its own."""

    problem: str = ""  # Why it cannot be imported; empty if it can.
    cuda: tuple[int, int] | None = None  # The CUDA version that it is built for.
    cuda_ops: str = ""  # Why LMCache's CUDA operations cannot be imported; empty if they can.
    nvcc: tuple[int, int] | None = None  # The version of CUDA's compiler; (0, 0): not known.
    ipc: str = ""  # Why no other process reads a GPU's memory; empty if one did.


@dataclass(frozen=True, slots=True)
class SoftwareFacts:
    """Python and the packages that have to fit together."""

    python: str
    packages: dict[str, str]  # Versions of the installed distributions.
    requires: dict[str, tuple[str, ...]]  # The requirements of some of them.
    string_hash: int  # Of a fixed string, in a process with the engines' hash seed.
    torch: TorchFacts | None = None  # None: not installed, or there is no GPU.


@dataclass(frozen=True, slots=True)
class CompilerFacts:
    """The compiler and the headers that Triton finds."""

    python: str  # `3.11`, whose headers it needs.
    cc: str | None  # The environment's `CC`.
    compiler: str  # The compiler's path; empty if there is none.
    header: str  # Where `Python.h` has to be.
    has_header: bool


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Memory and disk in bytes, and limits of processes, as the container has them."""

    memory_total_bytes: int
    memory_available_bytes: int
    shm_total_bytes: int
    disk: dict[str, tuple[str, int]]  # Folder and free space, by purpose.
    transparent_huge_pages: str  # `always`, `madvise` or `never`; empty if Linux has none.
    open_files: int
    memory_limited: bool = False  # Whether the total is a container's limit.
    cpus: float | None = None
    dtype: tuple[str, str] = ("bfloat16", "")  # What the CPU has kernels for, and why.
    lockable_bytes: int | None = None  # None: unlimited.
    rdma: bool = False  # Whether a network card reads memory by itself.
    sockets: int = 1
    expandable: tuple[str, ...] = ()  # Variables that switch PyTorch's expandable segments on.
    open_token: str = ""  # The file of Ray's token, if other users may read it.
    kv_layout: str = ""  # vLLM's variable; empty: engines choose.
    architecture: str = "x86_64"


@dataclass(frozen=True, slots=True)
class PortFacts:
    """A TCP port that a setting names."""

    setting: str
    purpose: str
    host: str
    port: int
    free: bool
    holder: str = ""  # The process that listens there, if it can be seen.
    ours: bool = False  # Whether that process is ConServe's.


@dataclass(frozen=True, slots=True)
class ListenerFacts:
    """A process that listens on more than loopback.

    Its owner is ``router``, ``engine``, ``LMCache``, ``Ray`` or ``vLLM``.
    """

    owner: str
    process: str
    pid: int
    addresses: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class HolderFacts:
    """A process that has memory of a GPU."""

    pid: int  # Outside of containers.
    name: str = ""  # Empty if it is not visible from here.
    memory_bytes: int | None = None
    owner: str = ""  # As in `ListenerFacts`; empty for other processes.


@dataclass(frozen=True, slots=True)
class CardFacts:
    """A GPU or a MIG device."""

    label: str  # `GPU 0`, or `MIG device 1 of GPU 0`.
    name: str
    memory_bytes: int
    free_bytes: int
    holders: tuple[HolderFacts, ...] = ()
    mig: bool = False  # Whether it is in MIG mode, where only its MIG devices are of use.
    parts: tuple["CardFacts", ...] = ()


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """GPUs, as NVML shows them."""

    devices: bool  # Whether the kernel shows NVIDIA devices.
    problem: str = ""  # Why NVML cannot be used; empty if it can.
    driver: str = ""
    cuda: tuple[int, int] = (0, 0)  # The newest that the driver runs.
    cards: tuple[CardFacts, ...] = ()
    lost: tuple[int, ...] = ()  # Indices of GPUs that do not answer.
    may_cap_power: bool = False


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Everything that is observed of one node."""

    software: SoftwareFacts
    machine: MachineFacts
    gpus: GpuFacts
    ports: tuple[PortFacts, ...] = ()
    listeners: tuple[ListenerFacts, ...] = ()
    of_addons: tuple["Finding", ...] = ()  # By add-ons that judge what they run.
    name: str = ""  # Its address in the cluster; empty for a machine by itself.
    compiler: CompilerFacts | None = None
    resources: dict[str, float] = field(default_factory=dict)  # By Ray's account.
    labels: dict[str, str] = field(default_factory=dict)
    clock_ahead_s: float = 0.0  # Of the asking node's clock.
    clock_error_s: float = 0.0  # Half the shortest round trip.
    unreachable: tuple[str, ...] = ()  # Nodes that it cannot open a TCP connection to.


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check; a ``warning`` works, but worse than it could."""

    level: Literal["ok", "note", "warning", "wrong"]
    subject: str
    seen: str
    to_do: str = ""
    node: str = ""  # Empty: this machine, or the whole cluster.


ok, note = partial(Finding, "ok"), partial(Finding, "note")
warning, wrong = partial(Finding, "warning"), partial(Finding, "wrong")


def exit_status(findings: Iterable[Finding]) -> int:
    """Return 1 if something is wrong, else 0."""
    return int(any(finding.level == "wrong" for finding in findings))


def gibibytes(size_bytes: float) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"
