"""`make install` and `make install-gpu`: each makes an environment, and neither is in the way."""

import shutil
from pathlib import Path

import pytest

from tests.checkout import ROOT
from tests.unit.stand_in_python import StandInMachine

PACKAGES = (
    "autoscale", "conserve", "conserve_cli", "conserve_inside", "conserve_lab", "conserve_tools",
    "deployments", "hetero",
)  # fmt: skip
FILES = ("LICENSE", "Makefile", "README.md", "pyproject.toml")
PINS = ("requirements-cpu.txt", "requirements-gpu.txt")


@pytest.fixture
def machine(tmp_path: Path) -> StandInMachine:
    """A machine with a checkout in the home."""
    machine = StandInMachine(tmp_path, *PINS)
    machine.copy({one: one for one in (*PACKAGES, *FILES, *PINS)}, ["__pycache__"])
    return machine


def ready(machine: StandInMachine, environment: str) -> bool:
    return (machine.home / environment / ".installed").exists()


def test_gpus_have_an_environment_beside_the_one_for_cpus(machine: StandInMachine) -> None:
    """In the README's order: the demo first, then the GPU."""
    assert (
        "\n.venv/bin/python -m pytest tests/acceptance/gpu"
        in machine.run("make -n test-gpu").stdout
    )
    for target, environment in (("install", ".venv"), ("install-gpu", ".venv-gpu")):
        done = machine.run(f"make {target}")
        assert done.returncode == 0, done.stderr
        assert f"conserve: {environment} is ready" in done.stdout
        assert ready(machine, environment)
    pins = [one.partition(" -r ")[2] for one in machine.asked() if " -r " in one]
    assert pins == ["requirements-cpu.txt", "requirements-gpu.txt"]
    # Whichever is meant, it is not made anew, and targets find theirs.
    before = machine.asked()
    for again in ("install", "install-gpu", "install VENV=.venv-gpu", "install-gpu VENV=.venv-gpu"):
        assert machine.run(f"make {again}").returncode == 0
    assert machine.asked() == before
    for target, environment in (
        ("test-gpu", ".venv-gpu"),
        ("test-unit", ".venv"),
        ("serve", ".venv"),
        ("demo", ".venv"),
        ("serve VENV=.venv-gpu", ".venv-gpu"),
    ):
        *_, last = machine.run(f"make -n {target}").stdout.splitlines()
        assert last.startswith(f"{environment}/bin/"), target
    # A demo without a GPU's set-up runs on CPUs, even where there is a GPU.
    assert "device=cpu" in machine.run("make -n demo").stdout
    assert "device=cpu" not in machine.run("make -n demo VENV=.venv-gpu").stdout
    # After a change of the versions, each is brought up to date with its own.
    for file in PINS:
        (machine.home / file).touch()
    assert "-r requirements-gpu.txt" in machine.run("make -n install VENV=.venv-gpu").stdout
    assert "-r requirements-cpu.txt" in machine.run("make -n install").stdout
    # The one for CPUs is not made one for GPUs.
    done = machine.run("make install-gpu VENV=.venv")
    assert done.returncode
    assert "conserve: .venv is for CPUs." in done.stderr
    assert "makes .venv-gpu beside .venv" in done.stderr
    assert machine.asked() == before
    assert machine.run("make clean").returncode == 0
    assert not list(machine.home.glob(".venv*"))


def test_what_triton_needs_is_looked_for_before_anything_is_fetched(
    machine: StandInMachine,
) -> None:
    header = machine.headers / "Python.h"
    header.unlink()
    done = machine.run("make install-gpu")
    assert done.returncode
    assert f"conserve: no {header}: Triton compiles with it" in done.stderr
    assert "-dev)" in done.stderr
    assert machine.asked() == []


def test_another_file_of_a_pinned_version_is_not_installed(machine: StandInMachine) -> None:
    """With the hashes, which the stand-ins of other tests do not have."""
    shutil.copy(ROOT / "requirements-cpu.txt", machine.home)
    done = machine.run("make install")
    assert done.returncode
    assert "THESE PACKAGES DO NOT MATCH THE HASHES" in done.stderr
    assert "aiofile==3.12.3" in done.stderr
    assert not ready(machine, ".venv")
