"""The facts that are observed of a node, as plain data that can be sent between nodes."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class TorchFacts:
    """Tells what PyTorch says, imported in a process of its own.

    Attributes:
        problem: why it cannot be imported; empty if it can.
        cuda: the CUDA that it is built for, as major and minor number; None: for none.
        cuda_ops: why LMCache's CUDA operations cannot be imported beside it; empty if they can.
    """

    problem: str = ""
    cuda: tuple[int, int] | None = None
    cuda_ops: str = ""


@dataclass(frozen=True, slots=True)
class SoftwareFacts:
    """Python and the packages that have to fit together.

    Attributes:
        python: ``3.11.15``.
        packages: versions by distribution name; what is not installed is absent.
        requires: what each of these distributions says it needs.
        string_hash: hash of a fixed string, in a process with the engines' hash seed.
        torch: None where it was not asked: it is not installed, or there is no GPU.
    """

    python: str
    packages: dict[str, str]
    requires: dict[str, tuple[str, ...]]
    string_hash: int
    torch: TorchFacts | None = None


@dataclass(frozen=True, slots=True)
class CompilerFacts:
    """The compiler and the headers that Triton finds.

    Attributes:
        python: ``3.11``, of which it needs the headers.
        cc: the compiler that the environment's ``CC`` names; None: it names none.
        compiler: the compiler's path; empty if there is none.
        header: where ``Python.h`` is, or would have to be.
        has_header: whether it is there.
    """

    python: str
    cc: str | None
    compiler: str
    header: str
    has_header: bool


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Memory and disk, in bytes, and limits of processes; each as the container has it.

    Attributes:
        disk: free space by what it is for, each with its folder.
        transparent_huge_pages: ``always``, ``madvise`` or ``never``; empty if Linux has none.
        reserved_huge_pages_bytes: memory set aside for huge pages and not used.
        open_files: how many files a process may open.
        memory_limited: whether the total is a container's limit, and less than the machine has.
        cpus: how many processes may run at a time; None: not known.
        lockable_bytes: memory that a process may lock; None: any.
        rdma: whether there is a network card that reads memory by itself.
        expandable: the variables of the environment that have PyTorch's allocator use expandable
            segments.
    """

    memory_total_bytes: int
    memory_available_bytes: int
    shm_total_bytes: int
    disk: dict[str, tuple[str, int]]
    transparent_huge_pages: str
    reserved_huge_pages_bytes: int
    open_files: int
    memory_limited: bool = False
    cpus: float | None = None
    lockable_bytes: int | None = None
    rdma: bool = False
    expandable: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PortFacts:
    """A TCP port that the application needs.

    Attributes:
        setting: the setting that names it.
        purpose: who is to listen there.
        free: whether nobody listens there now.
        holder: the process that listens there, if it can be seen.
        ours: whether that process is ConServe's.
    """

    setting: str
    purpose: str
    host: str
    port: int
    free: bool
    holder: str = ""
    ours: bool = False


@dataclass(frozen=True, slots=True)
class ListenerFacts:
    """A process of ConServe's, Ray's or vLLM's that other machines may reach.

    Attributes:
        owner: whose process it is: ``router``, ``engine``, ``LMCache``, ``Ray`` or ``vLLM``.
        process: its name.
        pid: its process id.
        addresses: where it listens on more than loopback, each a host and a port.
    """

    owner: str
    process: str
    pid: int
    addresses: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class EnvironmentFacts:
    """A folder of tool environments.

    Attributes:
        managed: whether an application manages it now.
        workspaces: how many environments have files there.
        pids: processes that run in one although nobody manages it.
    """

    root: str
    managed: bool
    workspaces: int
    pids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class HolderFacts:
    """A process that has memory of a GPU.

    Attributes:
        pid: its id outside of containers.
        name: empty where it is not visible from here.
        memory_bytes: None where the driver does not say.
        owner: whose it is, as in `ListenerFacts`; empty: nobody's here.
    """

    pid: int
    name: str = ""
    memory_bytes: int | None = None
    owner: str = ""


@dataclass(frozen=True, slots=True)
class CardFacts:
    """A GPU, or a MIG device.

    Attributes:
        label: ``GPU 0``, as NVML numbers them; ``MIG device 1 of GPU 0``.
        holders: who has memory of it, as far as the driver says; of MIG devices, not of their GPU.
        mig: whether it is in MIG mode, and so of use by its MIG devices alone.
        parts: those.
    """

    label: str
    name: str
    memory_bytes: int
    free_bytes: int
    holders: tuple[HolderFacts, ...] = ()
    mig: bool = False
    parts: tuple["CardFacts", ...] = ()


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """Tells what NVML says.

    Attributes:
        devices: whether the kernel shows NVIDIA devices at all.
        problem: why NVML cannot be used; empty if it can.
        driver: its version.
        cuda: the newest CUDA that the driver runs.
        cards: GPUs that answer.
        lost: indices of GPUs that do not.
        may_cap_power: whether this process may change power limits.
    """

    devices: bool
    problem: str = ""
    driver: str = ""
    cuda: tuple[int, int] = (0, 0)
    cards: tuple[CardFacts, ...] = ()
    lost: tuple[int, ...] = ()
    may_cap_power: bool = False


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """All that is observed of one node.

    Attributes:
        name: its address in the cluster; empty for a machine by itself.
        compiler: None: not looked for.
        resources: its resources as Ray counts them, custom ones included.
        labels: the labels that Ray knows it by.
        clock_ahead_s: how far its clock is ahead of the asking node's.
        clock_error_s: how far off that may be: half the shortest round trip.
        unreachable: addresses of nodes that it cannot open a TCP connection to.
    """

    software: SoftwareFacts
    machine: MachineFacts
    gpus: GpuFacts
    ports: tuple[PortFacts, ...] = ()
    listeners: tuple[ListenerFacts, ...] = ()
    environments: tuple[EnvironmentFacts, ...] = ()
    name: str = ""
    compiler: CompilerFacts | None = None
    resources: dict[str, float] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    clock_ahead_s: float = 0.0
    clock_error_s: float = 0.0
    unreachable: tuple[str, ...] = ()


# --- what is found wrong --------------------------------------------------------------------------


Level = Literal["ok", "note", "warning", "wrong"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        level: ``ok``; ``note``: worth knowing; ``warning``: it works, but worse; ``wrong``: it
            does not work.
        subject: what was looked at, in a word or two.
        seen: what was found.
        to_do: what an operator can do; empty if nothing is to be done.
        node: where; empty: on this machine, or on the whole cluster.
    """

    level: Level
    subject: str
    seen: str
    to_do: str = ""
    node: str = ""


def exit_status(findings: Iterable[Finding]) -> int:
    """1 when something is wrong, else 0."""
    return int(any(finding.level == "wrong" for finding in findings))


def gibibytes(size_bytes: float) -> str:
    """A size as people write it."""
    return f"{size_bytes / 2**30:.1f} GiB"
