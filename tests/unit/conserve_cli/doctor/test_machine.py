"""A machine's memory, disk and limits."""

import dataclasses
from typing import Any

import pytest

from conserve.settings import load
from conserve_cli.doctor.machine import check_machine
from hetero.gpu_room import Crowd
from tests.unit.conserve_cli.doctor.sound import GIB, MACHINE, SETTINGS, bad


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, []),
        ({"memory_available_bytes": 13 * GIB}, [("warning", "memory")]),
        ({"memory_available_bytes": 7 * GIB, "memory_total_bytes": 8 * GIB}, [("wrong", "memory")]),
        ({"shm_total_bytes": 64 * 2**20}, [("wrong", "shared memory")]),
        ({"disk": {"models": ("/m", GIB), "Ray": ("/tmp", 9 * GIB)}}, [("wrong", "disk")]),
        ({"transparent_huge_pages": "never"}, [("note", "huge pages")]),
        ({"transparent_huge_pages": ""}, []),
        ({"reserved_huge_pages_bytes": GIB}, [("note", "huge pages")]),
        ({"open_files": 1024}, [("warning", "files")]),
    ],
)
def test_a_machine(change: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    """Three engines on the CPU and 2 GiB for LMCache take about 14 GiB."""
    facts = dataclasses.replace(MACHINE, **change)
    assert bad(check_machine(facts, SETTINGS, cpu_engines=3)) == expected


def test_memory_is_the_containers() -> None:
    facts = dataclasses.replace(
        MACHINE,
        memory_total_bytes=8 * GIB,
        memory_available_bytes=7 * GIB,
        memory_limited=True,
    )
    (finding, *_) = check_machine(facts, SETTINGS, cpu_engines=3)
    assert finding.seen.startswith("7.0 GiB of the container's limit of 8.0 GiB available; 14.0")
    assert finding.to_do.endswith("or give the container more")
    # A size that nobody has set is half of what is free.
    (finding, *_) = check_machine(
        dataclasses.replace(facts, memory_available_bytes=2 * GIB), SETTINGS, cpu_engines=0
    )
    assert finding.level == "ok"


FOUR_ENGINES = Crowd(engines=4, workers=4)


@pytest.mark.parametrize(
    ("cpus", "level", "seen"),
    [
        # Four engines are twelve processes, of which eight wait for each other.
        (24.0, "ok", "24 CPUs for 4 engines"),
        (23.9, "note", "for each of 12 processes"),
        (8.0, "note", "for each of 12 processes"),
        (7.5, "warning", "7.5 CPUs; the cores and workers of 4 engines with 4 workers on GPUs"),
        (0.5, "warning", "are 8 processes"),
    ],
)
def test_processes_that_wait_for_each_other_want_cpus(cpus: float, level: str, seen: str) -> None:
    facts = dataclasses.replace(MACHINE, cpus=cpus)
    (finding,) = (
        one
        for one in check_machine(facts, SETTINGS, 0, crowd=FOUR_ENGINES)
        if one.subject == "CPUs"
    )
    assert finding.level == level
    assert seen in finding.seen
    assert level == "ok" or "24" in finding.to_do
    assert not [one for one in check_machine(facts, SETTINGS, 2) if one.subject == "CPUs"]


def test_an_allocator_that_shares_nothing_is_said() -> None:
    facts = dataclasses.replace(MACHINE, expandable=("PYTORCH_CUDA_ALLOC_CONF",))
    assert bad(check_machine(facts, SETTINGS, 0, crowd=FOUR_ENGINES)) == [("note", "PyTorch")]
    assert bad(check_machine(facts, SETTINGS, 3)) == []


@pytest.mark.parametrize(
    ("change", "settings", "expected"),
    [
        ({"lockable_bytes": 8 << 20}, {}, [("wrong", "locked memory")]),
        ({"lockable_bytes": None}, {}, []),
        ({"lockable_bytes": 8 << 20, "rdma": False}, {}, []),
        # Half of 60 GiB, unless it is said.
        ({"lockable_bytes": 29 * GIB}, {}, [("wrong", "locked memory")]),
        ({"lockable_bytes": 30 * GIB}, {}, []),
        ({"lockable_bytes": 5 * GIB}, {"lmcache.size_gb": 4}, []),
        ({"lockable_bytes": 3 * GIB}, {"lmcache.size_gb": 4}, [("wrong", "locked memory")]),
    ],
)
def test_a_card_that_reads_memory_by_itself_wants_it_locked(
    change: dict[str, Any], settings: dict[str, Any], expected: list[tuple[str, str]]
) -> None:
    facts = dataclasses.replace(MACHINE, rdma=True)
    facts = dataclasses.replace(facts, **change)
    assert bad(check_machine(facts, load(settings), 0, several=True)) == expected
    assert bad(check_machine(facts, load(settings), 0)) == []


def test_little_shared_memory_is_said_with_what_wants_it() -> None:
    facts = dataclasses.replace(MACHINE, shm_total_bytes=64 << 20)
    several_workers = Crowd(engines=1, workers=2)
    for crowd, needs in ((None, "Ray and engines"), (several_workers, "NCCL between an engine's")):
        (finding,) = (
            one for one in check_machine(facts, SETTINGS, 0, crowd=crowd) if one.level == "wrong"
        )
        assert finding.seen.startswith("/dev/shm has 0.1 GiB; ")
        assert needs in finding.seen
        assert "--shm-size=8g" in finding.to_do


def test_memory_is_what_the_settings_ask_for() -> None:
    facts = dataclasses.replace(MACHINE, memory_available_bytes=3 * GIB)
    assert bad(check_machine(facts, SETTINGS, cpu_engines=0)) == []
    large = load({"lmcache": {"size_gb": 100}})
    (finding, *_) = check_machine(MACHINE, large, cpu_engines=0)
    assert finding.level == "wrong"
    assert "100 GiB for LMCache" in finding.seen
