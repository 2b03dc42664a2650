"""What a container leaves of its machine: control groups of both versions, nested, and without."""

import contextlib
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hetero.container import HostMemory, _levels, cpu_dtype, host_memory, usable_cpus
from tests.checkout import ROOT

GIB = 2**30
MACHINE = psutil.virtual_memory().total
# Less than any machine that runs these tests has.
SMALL = 512 * 2**20
# What version 1 says where there is no limit.
NO_LIMIT = 9223372036854771712


class Groups:
    """The files of ``/proc`` and ``/sys`` that tell of control groups, below a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "proc/self").mkdir(parents=True)

    def show(self, groups: str, mounts: str) -> None:
        (self.root / "proc/self/cgroup").write_text(groups)
        (self.root / "proc/self/mountinfo").write_text(mounts)

    def write(self, folder: str, **files: object) -> None:
        place = self.root / folder.lstrip("/")
        place.mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            (place / name.replace("__", ".", 1)).write_text(f"{value}\n")

    def memory(self) -> HostMemory:
        return host_memory(self.root)

    def assert_unlimited(self) -> None:
        assert (self.memory().total_bytes, self.memory().limited) == (MACHINE, False)
        assert usable_cpus(self.root) == len(os.sched_getaffinity(0))


@pytest.fixture
def groups(tmp_path: Path) -> Groups:
    return Groups(tmp_path)


CGROUP = "/sys/fs/cgroup"
V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup rw,nsdelegate\n"
V1 = (
    "31 23 0:27 / /sys/fs/cgroup ro - tmpfs tmpfs ro,mode=755\n"
    "35 31 0:31 {} /sys/fs/cgroup/memory ro master:15 - cgroup cgroup rw,memory\n"
    "36 31 0:32 {} /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct\n"
)


X86 = "flags\t\t: fpu avx2 avx_vnni "


@pytest.mark.parametrize(
    ("cpuinfo", "limit", "dtype", "why"),
    [
        (X86, "", "float32", "no bfloat16 kernels (neither AVX512-BF16 nor AMX)"),
        (X86 + "avx512f avx512bw avx512_vnni", "", "float32", "no bfloat16 kernels"),
        (X86 + "avx512_bf16", "", "bfloat16", "has bfloat16 kernels (AVX512-BF16)"),
        (X86 + "avx512_bf16 amx_bf16", "DEFAULT", "bfloat16", "(AVX512-BF16 and AMX)"),
        (X86 + "amx_bf16", "AVX512_CORE_AMX", "bfloat16", "(AMX)"),
        (X86 + "avx512_bf16 amx_bf16", "avx512_core_vnni", "float32", "ONEDNN_MAX_CPU_ISA=avx512"),
        (X86 + "avx512_bf16", "AVX2", "float32", "ONEDNN_MAX_CPU_ISA=AVX2"),
        ("Features\t: fp asimd bf16 i8mm", "", "bfloat16", "Arm's BF16"),
        ("Features\t: fp asimd", "", "float32", "no bfloat16 kernels"),
    ],
)
def test_a_cpus_flags_decide_its_dtype(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cpuinfo: str,
    limit: str,
    dtype: str,
    why: str,
) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(cpuinfo)
    found = cpu_dtype(tmp_path)
    assert found[0] == dtype
    assert why in found[1]


def test_without_control_groups_it_is_the_machines(groups: Groups) -> None:
    groups.assert_unlimited()


def test_a_container_that_sees_itself_as_the_topmost_group(groups: Groups) -> None:
    """As Docker has it with version 2."""
    groups.show("0::/\n", V2)
    cache = f"anon 1\nactive_file {SMALL // 8}\ninactive_file {SMALL // 8}"
    groups.write(CGROUP, memory__max=SMALL, memory__current=SMALL // 2, memory__stat=cache)
    groups.write(CGROUP, cpu__max="50000 100000")
    memory = groups.memory()
    assert memory == HostMemory(SMALL, SMALL // 2 + SMALL // 4, True)
    assert memory.said() == "0.4 of the container's limit of 0.5 GiB are available"
    assert usable_cpus(groups.root) == 0.5


def test_max_is_no_limit(groups: Groups) -> None:
    groups.show("0::/\n", V2)
    groups.write(CGROUP, memory__max="max", memory__high="max", memory__current=GIB)
    groups.write(CGROUP, cpu__max="max 100000")
    groups.assert_unlimited()


@pytest.mark.parametrize("least", ["/kubepods", "/kubepods/pod1", "/kubepods/pod1/inner"])
def test_the_least_limit_up_the_tree_counts(groups: Groups, least: str) -> None:
    groups.show("0::/kubepods/pod1/inner\n", V2)
    for folder in ("/kubepods", "/kubepods/pod1", "/kubepods/pod1/inner"):
        limit = SMALL if folder == least else 2 * SMALL
        groups.write(f"/sys/fs/cgroup{folder}", memory__max=limit, memory__current=SMALL // 4)
    assert groups.memory() == HostMemory(SMALL, SMALL - SMALL // 4, True)


def test_memory_that_neighbours_below_the_same_limit_have_is_not_free(groups: Groups) -> None:
    groups.show("0::/pod/mine\n", V2)
    groups.write("/sys/fs/cgroup/pod", memory__max=SMALL, memory__current=SMALL - 1000)
    groups.write("/sys/fs/cgroup/pod/mine", memory__max="max", memory__current=4096)
    assert groups.memory() == HostMemory(SMALL, 1000, True)


def test_beyond_the_high_mark_nothing_is_to_be_had(groups: Groups) -> None:
    groups.show("0::/\n", V2)
    groups.write("/sys/fs/cgroup", memory__max="max", memory__high=SMALL, memory__current=2 * SMALL)
    assert groups.memory() == HostMemory(SMALL, 0, True)


@pytest.mark.parametrize("above", ["/", "/docker/abc"])
def test_version_one_by_the_hosts_path(groups: Groups, above: str) -> None:
    """The group's path is the host's, and what is mounted is all groups, or this one alone."""
    groups.show("5:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n0::/\n", V1.format(above, above))
    folder = "" if above == "/docker/abc" else "/docker/abc"
    memory, cpus = f"{CGROUP}/memory{folder}", f"{CGROUP}/cpu,cpuacct{folder}"
    cache = f"active_file 5\ntotal_active_file {SMALL // 4}\ntotal_inactive_file 0"
    groups.write(memory, memory__limit_in_bytes=SMALL, memory__usage_in_bytes=SMALL // 2)
    groups.write(memory, memory__stat=cache)
    groups.write(cpus, cpu__cfs_quota_us=25000, cpu__cfs_period_us=100000)
    assert groups.memory() == HostMemory(SMALL, SMALL // 2 + SMALL // 4, True)
    assert usable_cpus(groups.root) == 0.25


def test_version_one_without_limits(groups: Groups) -> None:
    groups.show("5:memory:/\n3:cpu,cpuacct:/\n", V1.format("/", "/"))
    groups.write("/sys/fs/cgroup/memory", memory__limit_in_bytes=NO_LIMIT)
    groups.write("/sys/fs/cgroup/cpu,cpuacct", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100000)
    groups.assert_unlimited()


def test_a_path_that_is_not_shown_here_is_the_topmost_group(groups: Groups) -> None:
    groups.show("5:memory:/docker/abc\n0::/../../other\n", V1.format("/docker/abc/init", "/x"))
    groups.write("/sys/fs/cgroup/memory", memory__limit_in_bytes=SMALL)
    assert groups.memory().total_bytes == SMALL


@contextlib.contextmanager
def real_group() -> Iterator[Path]:
    """A control group of this machine's, nested in this process's own, with limits to set."""
    for own in _levels("memory", Path("/")):
        group = own / f"conserve-{uuid.uuid4().hex}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if any((group / name).exists() for name in ("memory.max", "memory.limit_in_bytes")):
                yield group
                return
        finally:
            group.rmdir()
    pytest.skip("this user cannot make a control group with a memory limit here")


def test_a_real_limit_of_a_real_process() -> None:
    code = (
        "import sys; from pathlib import Path; from hetero.container import host_memory\n"
        "inner = Path(sys.argv[1]) / 'inner'; inner.mkdir()\n"
        "(inner / 'cgroup.procs').write_text('0')\n"
        "seen = host_memory(); print(seen.total_bytes, seen.available_bytes, seen.limited)\n"
    )
    with real_group() as group:
        name = "memory.max" if (group / "memory.max").exists() else "memory.limit_in_bytes"
        (group / name).write_text(str(SMALL))
        try:
            done = subprocess.run(
                [sys.executable, "-c", code, str(group)],
                cwd=ROOT, capture_output=True, text=True, timeout=60,
            )  # fmt: skip
        finally:
            with contextlib.suppress(OSError):
                (group / "inner").rmdir()
    if done.returncode and "cgroup.procs" in done.stderr:
        pytest.skip("processes cannot be moved into control groups here")
    assert done.returncode == 0, done.stderr
    total, available, limited = done.stdout.split()
    assert (int(total), limited) == (SMALL, "True")
    # The process itself takes some.
    assert SMALL // 2 < int(available) < SMALL
