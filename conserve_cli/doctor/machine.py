"""A machine: memory, shared memory, disk, huge pages, files, CPUs, and what GPUs need of it."""

from conserve.settings import Settings
from conserve_cli.doctor.facts import (
    CardFacts,
    Finding,
    GpuFacts,
    HolderFacts,
    Level,
    MachineFacts,
    gibibytes,
)
from deployments.node.lmcache_server import THREADS
from hetero import host_memory
from hetero.gpu_layout import UTILISATION
from hetero.gpu_room import Crowd

# What an engine on a CPU takes beside its KV, for vLLM, PyTorch and a small model. Measured: one
# prefiller, two decoders and Ray took 14 GB, with 1 GiB of KV each.
_CPU_ENGINE_BYTES = 4 * 2**30
# Ray's object store and the workers of an engine live there; containers get 64 MiB by default.
_LEAST_SHM_BYTES = 2**30
_LEAST_DISK_BYTES = 2 * 2**30
# A core has two hyperthreads, which are what machines and containers count as CPUs.
_VCPUS = 2
# Each client, turn and worker takes some files.
_LEAST_OPEN_FILES = 4096


def check_machine(
    facts: MachineFacts,
    settings: Settings,
    cpu_engines: int,
    has_engines: bool = True,
    crowd: Crowd | None = None,
    several: bool = False,
) -> list[Finding]:
    """Judge whether a machine has what ConServe needs.

    Args:
        cpu_engines: how many engines would run here on the CPU.
        has_engines: whether any can be here, and with them an LMCache server.
        crowd: the engines that may be on its GPUs; None: none.
        several: whether KV moves between this node and others.
    """
    return [
        *([_memory(facts, settings, cpu_engines)] if has_engines else []),
        _shared_memory(facts, crowd),
        *_disk(facts),
        *_huge_pages(facts),
        _open_files(facts),
        *(_cpus(facts, crowd) if crowd else []),
        *(_copies(crowd) if crowd else []),
        *(_allocator(facts) if crowd else []),
        *(_locked_memory(facts, settings) if several and has_engines else []),
    ]


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
        return Finding("ok", "memory", seen)
    level: Level = "wrong" if facts.memory_total_bytes < needed else "warning"
    return Finding(
        level, "memory", f"{seen}; {gibibytes(needed)} are needed ({for_what})",
        "free some, or set a smaller lmcache.size_gb or fewer engines"
        + (", or give the container more" if facts.memory_limited else ""),
    )  # fmt: skip


def _shared_memory(facts: MachineFacts, crowd: Crowd | None) -> Finding:
    size = gibibytes(facts.shm_total_bytes)
    if facts.shm_total_bytes >= _LEAST_SHM_BYTES:
        return Finding("ok", "shared memory", f"/dev/shm has {size}")
    needs = "Ray and engines need 1 GiB at least"
    if crowd is not None and crowd.workers > crowd.engines:
        needs = "Ray, and NCCL between an engine's workers, need 1 GiB at least"
    return Finding(
        "wrong", "shared memory", f"/dev/shm has {size}; {needs}",
        "give the container more: docker run --shm-size=8g, or a memory-backed volume on /dev/shm; "
        "else start Ray on it by `conserve serve`, or with --object-store-memory=83886080",
    )  # fmt: skip


def _cpus(facts: MachineFacts, crowd: Crowd) -> list[Finding]:
    """Whether each process that looks for its next step again and again has a core to do so."""
    if facts.cpus is None:
        return []
    seen = f"{facts.cpus:.3g} CPUs"
    count = f"{crowd.engines} engines with {crowd.workers} workers on GPUs"
    if facts.cpus < crowd.waiting:
        return [
            Finding(
                "warning", "CPUs", f"{seen}; the cores and workers of {count} are {crowd.waiting} "
                "processes, which wait for each other asleep here, and late for their next step",
                f"give the container {_VCPUS * crowd.processes} (two hyperthreads for each, and "
                "for each engine's server), or run fewer engines here",
            )
        ]  # fmt: skip
    if facts.cpus < _VCPUS * crowd.processes:
        return [
            Finding(
                "note", "CPUs", f"{seen}; vLLM advises a core, of two hyperthreads, for each of "
                f"{crowd.processes} processes of {count}",
                f"{_VCPUS * crowd.processes} CPUs, if time between tokens matters",
            )
        ]  # fmt: skip
    return [Finding("ok", "CPUs", f"{seen} for {count}")]


def _copies(crowd: Crowd) -> list[Finding]:
    workers = max(THREADS, crowd.workers)
    return [
        Finding("ok", "KV copies", f"{workers} threads copy for {crowd.workers} workers on GPUs")
    ]


def _allocator(facts: MachineFacts) -> list[Finding]:
    if not facts.expandable:
        return []
    names = " and ".join(facts.expandable)
    return [
        Finding(
            "note", "PyTorch", f"{names}: expandable_segments:True, by which LMCache's server "
            "could not map an engine's memory; ConServe's engines switch it off",
            f"take it out of {names}, unless other programs here want it",
        )
    ]  # fmt: skip


def _locked_memory(facts: MachineFacts, settings: Settings) -> list[Finding]:
    """Whether a network card that reads LMCache's memory by itself may have all of it locked."""
    if not facts.rdma:
        return []
    needed = settings.lmcache.size_gb * 2**30
    if "size_gb" not in settings.lmcache.model_fields_set:
        # On GPUs it is chosen by what is free.
        needed = max(needed, 0.5 * facts.memory_available_bytes)
    if facts.lockable_bytes is None or facts.lockable_bytes >= needed:
        return [Finding("ok", "locked memory", "as much as LMCache's server shares by RDMA")]
    return [
        Finding(
            "wrong", "locked memory",
            f"a process may lock {gibibytes(facts.lockable_bytes)}, and RDMA wants "
            f"{gibibytes(needed)} of LMCache's locked: its server does not come up",
            "ulimit -l unlimited before Ray starts, on every node (docker run --ulimit memlock=-1; "
            "systemd: LimitMEMLOCK=infinity); or keep NIXL to TCP: UCX_TLS=tcp",
        )
    ]  # fmt: skip


def _disk(facts: MachineFacts) -> list[Finding]:
    findings = []
    for purpose, (folder, free) in facts.disk.items():
        if free >= _LEAST_DISK_BYTES:
            findings.append(Finding("ok", "disk", f"{gibibytes(free)} free for {purpose}"))
        else:
            findings.append(
                Finding(
                    "wrong", "disk", f"{gibibytes(free)} free in {folder}, for {purpose}",
                    "make room, 2 GiB at least; Ray stops placing work on a disk 95 % full",
                )
            )  # fmt: skip
    return findings


def _huge_pages(facts: MachineFacts) -> list[Finding]:
    findings = []
    if facts.transparent_huge_pages == "never":
        findings.append(
            Finding(
                "note", "huge pages", "transparent huge pages are off, which slows CPU engines",
                "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
            )
        )  # fmt: skip
    if facts.reserved_huge_pages_bytes:
        size = gibibytes(facts.reserved_huge_pages_bytes)
        findings.append(
            Finding(
                "note", "huge pages", f"{size} set aside for huge pages, which ConServe never uses",
                "sysctl vm.nr_hugepages=0, unless something else here uses them",
            )
        )  # fmt: skip
    return findings


def _open_files(facts: MachineFacts) -> Finding:
    seen = f"a process may have {facts.open_files} open"
    if facts.open_files >= _LEAST_OPEN_FILES:
        return Finding("ok", "files", seen)
    return Finding("warning", "files", seen, "ulimit -n 65536 before starting Ray, on every node")


# --- its GPUs -------------------------------------------------------------------------------------


# With less, there is no room for an engine of whatever share.
_LEAST_SHARE = 0.1


def check_gpus(
    facts: GpuFacts, settings: Settings, caps_power: bool, has_engines: bool = True
) -> list[Finding]:
    """Judge what NVML says of this node's GPUs.

    Args:
        caps_power: whether power caps are asked for here.
        has_engines: whether engines can be here at all.
    """
    if not facts.devices:
        if not has_engines:
            return [Finding("ok", "GPU", "none; no engine runs here")]
        if settings.device == "gpu":
            return [
                Finding(
                    "wrong", "GPU", "no NVIDIA device here, and device=gpu",
                    "give the container its GPUs, mend the driver, or set device=auto",
                )
            ]  # fmt: skip
        return [Finding("ok", "GPU", "none; engines run on the CPU")]
    if facts.problem:
        return [Finding("wrong", "GPU", "NVML cannot be used", facts.problem)]
    names = [card.name for card in facts.cards]
    named = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    runs = f"driver {facts.driver}, CUDA up to {facts.cuda[0]}.{facts.cuda[1]}"
    findings = [Finding("ok", "GPU", f"{named or 'none answers'}; {runs}")]
    findings += [
        Finding(
            "wrong", "GPU", f"GPU {index} does not answer: it fell off the bus",
            "see dmesg for its Xid; reset it or restart the machine",
        )
        for index in facts.lost
    ]  # fmt: skip
    if has_engines and settings.device != "cpu":
        for card in facts.cards:
            findings += _mig(card) if card.mig else []
            findings += [one for part in card.parts or (card,) for one in _card_memory(part)]
    if caps_power and not facts.may_cap_power:
        findings.append(
            Finding(
                "warning", "power", "this user may not change power limits: GPUs run uncapped",
                "run the node's Ray as root or with CAP_SYS_ADMIN (docker: --cap-add SYS_ADMIN)",
            )
        )  # fmt: skip
    return findings


def _mig(card: CardFacts) -> list[Finding]:
    number = card.label.split()[-1]
    leave = f"leave the mode (nvidia-smi -i {number} -mig 0)"
    if not card.parts:
        return [
            Finding(
                "wrong", "MIG", f"{card.label} is in MIG mode and has no MIG device: no engine can "
                "use it", f"make one (nvidia-smi mig -i {number} -cgi ... -C), or {leave}",
            )
        ]  # fmt: skip
    if len(card.parts) == 1:
        size = gibibytes(card.parts[0].memory_bytes)
        return [Finding("ok", "MIG", f"{card.label} is in MIG mode, with one device of {size}")]
    sizes = ", ".join(gibibytes(part.memory_bytes) for part in card.parts)
    return [
        Finding(
            "warning", "MIG",
            f"{card.label} is in MIG mode, with {len(card.parts)} devices ({sizes}): CUDA shows a "
            "process one of them, so LMCache's server reaches no engine on another",
            "have all engines on one, by CUDA_VISIBLE_DEVICES=MIG-... before Ray starts; or "
            + leave,
        )
    ]  # fmt: skip


def _card_memory(card: CardFacts) -> list[Finding]:
    # vLLM does not start an engine where its share is not free.
    if card.mig or card.free_bytes >= UTILISATION * card.memory_bytes:
        return []
    free = f"{gibibytes(card.free_bytes)} of {gibibytes(card.memory_bytes)}"
    held = ", ".join(_held(one) for one in card.holders)
    seen = f"{card.label} has {free} free; {held or 'who has the rest cannot be seen from here'}"
    if card.holders and all(one.owner for one in card.holders):
        return [
            Finding(
                "note", "GPU memory", seen,
                "nothing, if that is the application; else end it before another starts",
            )
        ]  # fmt: skip
    full = card.free_bytes < _LEAST_SHARE * card.memory_bytes
    return [
        Finding(
            "wrong" if full else "warning", "GPU memory",
            f"{seen}; " + ("no engine starts there" if full else "an engine of vLLM's usual share "
            f"of {UTILISATION:.0%} does not start there"),
            "end what has it" + (" (nvidia-smi lists it)" if not held else "")
            + ", or keep engines off that GPU by CUDA_VISIBLE_DEVICES"
            + ("" if full else ", or set a smaller engine.gpu_memory_utilization"),
        )
    ]  # fmt: skip


def _held(one: HolderFacts) -> str:
    has = "some" if one.memory_bytes is None else gibibytes(one.memory_bytes)
    return f"{one.name or 'a process not visible from here'} (pid {one.pid}) has {has}"
