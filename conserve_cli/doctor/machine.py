"""A machine: memory, shared memory, disk, huge pages, files."""

from conserve.settings import Settings
from conserve_cli.doctor.facts import MachineFacts
from conserve_cli.doctor.findings import Finding, Level, gibibytes

# What an engine on a CPU takes beside its KV, for vLLM, PyTorch and a small model. Measured: one
# prefiller, two decoders and Ray took 14 GB, with 1 GiB of KV each.
_CPU_ENGINE_BYTES = 4 * 2**30
# Ray's object store and the workers of an engine live there; containers get 64 MiB by default.
_LEAST_SHM_BYTES = 2**30
_LEAST_DISK_BYTES = 2 * 2**30
# Each client, turn and worker takes some files.
_LEAST_OPEN_FILES = 4096


def check_machine(
    facts: MachineFacts, settings: Settings, cpu_engines: int, has_engines: bool = True
) -> list[Finding]:
    """What ConServe needs of a machine.

    Args:
        cpu_engines: how many engines would run here on the CPU.
        has_engines: whether any can be here, and with them an LMCache server.
    """
    return [
        *([_memory(facts, settings, cpu_engines)] if has_engines else []),
        _shared_memory(facts),
        *_disk(facts),
        *_huge_pages(facts),
        _open_files(facts),
    ]


def _memory(facts: MachineFacts, settings: Settings, cpu_engines: int) -> Finding:
    available = facts.memory_available_bytes
    needed = settings.lmcache.size_gb * 2**30 + cpu_engines * _CPU_ENGINE_BYTES
    for_what = f"{settings.lmcache.size_gb:g} GiB for LMCache"
    if cpu_engines:
        for_what += f" and about 4 GiB for each of {cpu_engines} engines on the CPU"
    seen = f"{gibibytes(available)} of {gibibytes(facts.memory_total_bytes)} available"
    if available >= needed:
        return Finding("ok", "memory", seen)
    level: Level = "wrong" if facts.memory_total_bytes < needed else "warning"
    return Finding(
        level, "memory", f"{seen}; {gibibytes(needed)} are needed ({for_what})",
        "free some, or set a smaller lmcache.size_gb or fewer engines",
    )  # fmt: skip


def _shared_memory(facts: MachineFacts) -> Finding:
    size = gibibytes(facts.shm_total_bytes)
    if facts.shm_total_bytes >= _LEAST_SHM_BYTES:
        return Finding("ok", "shared memory", f"/dev/shm has {size}")
    return Finding(
        "wrong", "shared memory", f"/dev/shm has {size}; Ray and engines need 1 GiB at least",
        "give the container more: docker run --shm-size=8g, or a memory-backed volume on /dev/shm",
    )  # fmt: skip


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
