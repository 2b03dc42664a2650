"""A machine's memory, disk and limits."""

import dataclasses
from typing import Any

import pytest

from conserve.settings import load
from conserve_cli.doctor.machine import check_machine
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


def test_memory_is_what_the_settings_ask_for() -> None:
    facts = dataclasses.replace(MACHINE, memory_available_bytes=3 * GIB)
    assert bad(check_machine(facts, SETTINGS, cpu_engines=0)) == []
    large = load({"lmcache": {"size_gb": 100}})
    (finding, *_) = check_machine(MACHINE, large, cpu_engines=0)
    assert finding.level == "wrong"
    assert "100 GiB for LMCache" in finding.seen
