"""The C compiler and the headers that engines on GPUs need."""

import dataclasses
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from conserve.settings import Settings, load
from conserve_cli.doctor.command import line
from conserve_cli.doctor.compiler import check_compiler, observe_compiler
from conserve_cli.doctor.facts import CompilerFacts, GpuFacts
from conserve_cli.doctor.verdict import judge
from tests.checkout import ROOT
from tests.unit.conserve_cli.doctor.sound import (
    CUDA,
    H100,
    HEAD,
    NO_GPU,
    NODE,
    SETTINGS,
    WORKER,
    bad,
)

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
