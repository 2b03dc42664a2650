"""Fixtures of unit tests: GPUs that are not there."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero.nvml import Nvml
from tests.nvml import standin


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in for NVIDIA's library, which this process's nvidia-ml-py finds from now on."""
    library = standin.compile_library(tmp_path_factory.mktemp("nvml"))
    standin.load_here(library)
    return library


@pytest.fixture
def machine(nvml_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> standin.Machine:
    """Two A40s on which time moves when the test says so."""
    machine = standin.Machine(tmp_path / "gpus")
    monkeypatch.setenv(standin.VARIABLE, str(machine.file))
    return machine


@pytest.fixture
def nvml(machine: standin.Machine) -> Iterator[Nvml]:
    """A session with the stand-in."""
    with Nvml() as session:
        yield session
