"""The compiler and the headers that Triton needs."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from conserve_cli.doctor.command import line
from conserve_cli.doctor.compiler import check_compiler
from tests.checkout import ROOT


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for programs, beside one with Python's headers."""
    monkeypatch.setattr(sysconfig, "get_paths", lambda _: {"include": str(tmp_path)})
    (tmp_path / "Python.h").touch()
    (tmp_path / "bin").mkdir()
    return tmp_path / "bin"


def said(folder: Path, **variables: str) -> list[str]:
    return [line(one).plain for one in check_compiler({"PATH": str(folder), **variables})]


def test_it_is_looked_for_as_triton_does(programs: Path) -> None:
    """CC as it is, else gcc, else clang; not cc."""
    headers = f"and headers of Python {sys.version_info.major}.{sys.version_info.minor}"

    def program(name: str) -> list[str]:
        (programs / name).touch(mode=0o755)
        return [f"ok      compiler: {programs / name}, {headers}"]

    program("cc")
    assert said(programs) == [
        "wrong   compiler: no gcc and no clang: Triton compiles with one of them, and no engine "
        "starts on a GPU. To do: install gcc (Debian: apt-get install gcc), or name a C compiler "
        "in CC"
    ]
    clang = program("clang")
    assert said(programs) == clang
    assert said(programs, CC=str(programs / "clang")) == clang
    assert said(programs) == clang
    assert program("gcc") == said(programs)
    assert said(programs, CC="clang") == clang
    for bad in ("gcc -m64", "icc", ""):
        (found,) = said(programs, CC=bad)
        assert found.startswith(f"wrong   compiler: CC is {bad!r}, which is no program here")


def test_the_header_is_the_running_pythons(programs: Path) -> None:
    header = programs.parent / "Python.h"
    header.unlink()
    (programs / "gcc").touch(mode=0o755)
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    (found,) = said(programs)
    assert found.startswith(f"wrong   compiler: no {header}: Triton compiles with it, and no")
    assert found.endswith(
        f"the headers of Python {python} (Debian: apt-get install python{python}-dev)"
    )
    assert len(said(programs, CC="none")) == 2


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
