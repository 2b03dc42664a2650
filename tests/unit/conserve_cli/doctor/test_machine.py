"""Memory, disks, limits and CPUs of a machine."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conserve.settings import load
from conserve_cli.doctor import machine
from conserve_cli.doctor.machine import check_machine
from conserve_cli.doctor.node import check_node
from hetero.container import HostMemory
from hetero.gpu_room import Crowd
from tests.unit.conserve_cli.doctor.here import (
    GIB,
    KERNELS,
    NONE,
    SETTINGS,
    Here,
    about,
    assert_finds,
    unwell,
)

FOUR_ENGINES, TWO_WORKERS = Crowd(engines=4, workers=4), Crowd(engines=1, workers=2)
ON_CPUS: dict[str, Any] = {"cpu_engines": 3}
ON_GPUS: dict[str, Any] = {"cpu_engines": 0, "crowd": FOUR_ENGINES}
NO_SHM = {"shm_bytes": 64 << 20}
# Three engines on the CPU and 2 GiB for LMCache take about 14 GiB.
SHORT = "13.0 GiB of 64.0 GiB available; 14.0 GiB are needed (2 GiB for LMCache and about 4 GiB for"
LIMITED = (
    "7.0 GiB of the container's limit of 8.0 GiB available; 14.0 GiB are needed (2 GiB for LMCache "
    "and about 4 GiB for each of 3 engines on the CPU). To do: free some, or set a smaller "
    "lmcache.size_gb or fewer engines, or give the container more"
)


@pytest.mark.parametrize(
    ("change", "engines", "expected"),
    [
        ({"memory": HostMemory(64 * GIB, 13 * GIB)}, ON_CPUS, ("warning", "memory", SHORT)),
        ({"memory": HostMemory(8 * GIB, 7 * GIB, True)}, ON_CPUS, ("wrong", "memory", LIMITED)),
        (NO_SHM, ON_CPUS, ("wrong", "shared memory", "0.1 GiB; Ray and engines need 1 GiB at")),
        (NO_SHM, {"cpu_engines": 0, "crowd": TWO_WORKERS},
         ("wrong", "shared memory", "Ray, and NCCL between an engine's workers, need 1 GiB at")),
        ({"open_files": 1024}, ON_CPUS, ("warning", "files", "have 1024 open. To do: ulimit -n")),
        # Four engines are twelve processes, of which eight wait for each other.
        ({"cpus": 23.9}, ON_GPUS, ("note", "CPUs", "for each of 12 processes of 4 engines")),
        ({"cpus": 7.5}, ON_GPUS, ("warning", "CPUs", "7.5 CPUs; the cores and workers of 4 engines "
                                  "with 4 workers on GPUs are 8 processes")),
    ],
)  # fmt: skip
def test_a_machine(
    here: Here, change: dict[str, Any], engines: dict[str, Any], expected: tuple[str, str, str]
) -> None:
    assert unwell(check_machine(SETTINGS, **engines)) == []
    vars(here).update(change)
    assert_finds(check_machine(SETTINGS, **engines), expected)


def test_only_engines_on_gpus_want_many_cpus(here: Here) -> None:
    here.cpus = 24
    assert "24 CPUs for 4 engines" in about("CPUs", check_machine(SETTINGS, **ON_GPUS))[0]
    assert about("CPUs", check_machine(SETTINGS, **ON_CPUS)) == []


def test_memory_is_what_the_settings_ask_for(here: Here) -> None:
    large = load({"lmcache": {"size_gb": 100}})
    assert_finds(check_machine(large, 0), ("wrong", "memory", "100 GiB for LMCache"))
    # A size that nobody has set is half of what is free.
    for free in (2, 3):
        here.memory = HostMemory(8 * GIB, free * GIB)
        assert unwell(check_machine(SETTINGS, 0)) == []


def test_each_disk_that_is_full_is_named(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    here.free_bytes = GIB
    for name in ("HF_HOME", "RAY_TMPDIR"):
        monkeypatch.setenv(name, f"/full/{name}")
    found = check_machine(SETTINGS, 0)
    models, ray = (f"1.0 GiB free in /full/{name}, for" for name in ("HF_HOME", "RAY_TMPDIR"))
    assert_finds(found, ("wrong", "disk", f"{models} models"), ("wrong", "disk", f"{ray} Ray"))


def test_a_disk_for_kv_is_a_disk(
    here: Here, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def found(size_gb: float, path: Path = tmp_path) -> list[str]:
        settings = load({"lmcache": {"disk": {"path": str(path / "kv"), "size_gb": size_gb}}})
        return [one for one in about("disk", check_machine(settings, 0)) if "for KV" in one]

    assert "GiB free" in found(1)[0]
    here.free_bytes = 4 * GIB
    assert "for KV, not 5 GiB" in found(5)[0]
    mount = SimpleNamespace(mountpoint=str(tmp_path), fstype="tmpfs")
    monkeypatch.setattr(machine.psutil, "disk_partitions", lambda all: [mount])
    assert "(tmpfs), for KV, which is no disk" in found(1)[0]
    monkeypatch.setattr(machine.os, "access", lambda path, mode: False)
    assert "may not write" in found(1)[0]


def test_a_layout_by_which_kv_cannot_be_copied_is_named(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    for layout, expected in (("BHLNC", [("wrong", "KV layout")]), ("BLHNC", [])):
        monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", layout)
        assert unwell(check_machine(SETTINGS, **ON_GPUS)) == expected
        assert unwell(check_machine(SETTINGS, **ON_CPUS)) == []


@pytest.mark.parametrize(
    ("lockable", "rdma", "settings", "wrong"),
    [
        (8 << 20, True, {}, True),
        (None, True, {}, False),
        # Half of 60 GiB, unless it is said.
        (29 * GIB, True, {}, True),
        (30 * GIB, True, {}, False),
    ],
)
def test_a_card_that_reads_memory_by_itself_wants_it_locked(
    here: Here, lockable: int | None, rdma: bool, settings: dict[str, Any], wrong: bool
) -> None:
    here.lockable_bytes, here.rdma = lockable, rdma
    expected = [("wrong", "locked memory")] * wrong
    assert unwell(check_machine(load(settings), 0, several=True)) == expected
    assert unwell(check_machine(load(settings), 0)) == []


def test_a_token_that_others_may_read_is_seen(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(file))
    for mode, expected in ((0o600, []), (0o640, [("warning", "token", f"chmod 600 {file}")])):
        file.touch()
        file.chmod(mode)
        assert_finds(check_machine(SETTINGS, 0), *expected)


PROFILE = {"profile": "cpu-embedded"}


@pytest.mark.parametrize(
    ("own", "head", "given", "level", "fragment"),
    [
        (KERNELS, "bfloat16", {}, "ok", "engines compute in bfloat16; kernels here"),
        (NONE, "bfloat16", {}, "warning", "engines compute in bfloat16; no kernels here"),
        (NONE, "bfloat16", {"engine.dtype": "float32"}, "ok", "float32; no kernels here"),
        (NONE, "float32", PROFILE, "warning", "is of a CPU with kernels for bf"),
    ],
)
def test_a_cpu_without_kernels_for_the_dtype_is_named(
    here: Here, own: tuple[str, str], head: str, given: dict[str, Any], level: str, fragment: str
) -> None:
    """The head's CPU decides for all nodes, unless a dtype is set."""
    here.dtype = own
    (found,) = about("dtype", check_machine(load(given), 0, dtype=head))
    assert found.startswith(level)
    assert fragment in found


def test_this_machine_as_it_is() -> None:
    found = list(check_node(SETTINGS))
    (versions,) = about("versions", found)
    assert "ray 2.60." in versions
    assert {"memory", "shared memory", "disk", "files", "dtype", "port"} <= {
        one.subject for one in found
    }
