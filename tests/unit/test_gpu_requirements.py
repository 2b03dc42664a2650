"""requirements-gpu.txt: that it has all that is needed on GPUs, and that pip can have it."""

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.checkout import ROOT, pins
from tests.unit.stand_in_python import write_wheel

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = ("3.11", "3.12")
# There, vLLM's CUDA build asks for another version than its build for CPUs, or a build differs.
DIFFERENT = {"apache-tvm-ffi", "torch"}


def _lines(name: str) -> dict[str, Requirement]:
    found = [Requirement(pin) for pin in pins(name)]
    assert len({canonicalize_name(one.name) for one in found}) == len(found)
    return {canonicalize_name(one.name): one for one in found}


def _version(requirement: Requirement) -> str:
    (specifier,) = requirement.specifier
    assert specifier.operator in ("==", "===")
    return specifier.version


GPU = {name: _version(one) for name, one in _lines("requirements-gpu.txt").items()}


def _unmet(owner: str, lines: list[str], extras: set[str]) -> list[str]:
    """Which of an owner's requirements the pinned versions do not meet, with either Python."""
    unmet = []
    for line in lines:
        wanted = Requirement(line)
        applies = wanted.marker is None or any(
            wanted.marker.evaluate(
                {"python_version": one, "python_full_version": f"{one}.9", "extra": extra}
            )
            for one in PYTHONS
            for extra in {"", *extras}
        )
        pinned = GPU.get(canonicalize_name(wanted.name), "")
        if applies and not (pinned and wanted.specifier.contains(pinned, prereleases=True)):
            unmet.append(f"{owner} needs {line}, and {pinned or 'nothing'} is pinned")
    return unmet


def test_all_that_the_project_asks_for_is_pinned() -> None:
    extras = PROJECT["optional-dependencies"]
    groups = [PROJECT["dependencies"], *(extras[one] for one in ("bench", "cuda", "dev", "nodes"))]
    assert _unmet("conserve", [line for group in groups for line in group], set()) == []


def test_what_the_pinned_ask_of_each_other_is_pinned() -> None:
    """Of all that are installed here in the same version; the others, a resolver has to ask."""
    unmet, seen = [], 0
    for name, version in GPU.items():
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if found.version == version:
            seen += 1
            extras = {"serve"} if name == "ray" else set()
            unmet += _unmet(name, found.requires or [], extras)
    assert unmet == []
    assert seen > 150


def test_what_tests_run_with_on_cpus_is_what_gpus_get() -> None:
    cpu = {name: _version(one) for name, one in _lines("requirements-cpu.txt").items()}
    apart = {name for name in cpu.keys() & GPU.keys() if cpu[name] != GPU[name]}
    assert apart <= DIFFERENT
    assert Version(cpu["torch"]).public == GPU["torch"]


def _pip(*arguments: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pip", *arguments],
        capture_output=True, text=True, check=False, timeout=timeout_s,
    )  # fmt: skip


def test_torch_for_cpus_is_not_taken_for_newer(tmp_path: Path) -> None:
    """Where pip knows of an index that has it, as a machine without a GPU does."""
    for version in ("2.13.0", "2.13.0+cpu"):
        write_wheel(tmp_path, "torch", version)

    def picked(*wanted: str) -> str:
        done = _pip(
            "install", "--dry-run", "--ignore-installed", "--no-deps", "--no-index",
            "--find-links", str(tmp_path), *wanted,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        (found,) = re.findall(r"Would install torch-(\S+)", done.stdout)
        return str(found)

    assert picked("torch==2.13.0") == "2.13.0+cpu"  # What has to be kept from happening.
    assert picked(str(_lines("requirements-gpu.txt")["torch"])) == "2.13.0"
    (extra,) = (one for one in PROJECT["optional-dependencies"]["cuda"] if one.startswith("torch!"))
    assert picked("torch==2.13.0", extra) == "2.13.0"


@pytest.mark.long
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("python", PYTHONS)
def test_pip_resolves_it(python: str, tmp_path: Path) -> None:
    """As for a fresh environment; a registry may make pip fetch whole wheels for it, 4.3 GB."""
    if _pip("index", "versions", "vllm").returncode:
        pytest.skip("no package registry answers")
    done = _pip(
        "install", "--dry-run", "--ignore-installed", "--only-binary=:all:",
        "--python-version", python, "--target", str(tmp_path), "-r",
        str(ROOT / "requirements-gpu.txt"), timeout_s=5000,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (installed,) = re.findall(r"^Would install (.*)$", done.stdout, re.MULTILINE)
    assert len(installed.split()) == len(GPU)
