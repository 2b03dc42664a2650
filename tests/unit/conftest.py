"""Fixtures of unit tests: GPUs that are not there, and a Ray that is as it was."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray._private import ray_constants
from ray.serve._private import replica

from conserve.conversations.ledger import Ledger
from hetero.nvml import Nvml
from tests.nvml import library, standin

# A history gets into no state that cannot follow its own.
Ledger.strict = True
# Tests see stand-in GPUs alone, whatever the machine has.
library.load_here()
# A proxy is no way to this machine.
for _name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
    os.environ.pop(_name, None)
# Programs print as into a file, whatever the terminal: consoles look as their modules are imported,
# and pytest-xdist tells its workers of a width.
for _name in ("COLUMNS", "LINES", "FORCE_COLOR", "GITHUB_ACTIONS"):
    os.environ.pop(_name, None)
os.environ["TERM"] = "xterm"


@pytest.fixture(scope="module", autouse=True)
def environment_as_before() -> Iterator[None]:
    """Undo what a file's tests change of the environment: vLLM sets some ten variables itself."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> standin.Machine:
    """Two A40s on which time moves when the test says so."""
    machine = standin.Machine(tmp_path / "gpus")
    monkeypatch.setenv(standin.VARIABLE, str(machine.file))
    return machine


@pytest.fixture
def nvml(machine: standin.Machine) -> Iterator[Nvml]:
    """A session with the stand-in."""
    with Nvml() as session:
        yield session


@pytest.fixture
def ray_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `deployments.upstream` changes of Ray is changed back, for the tests that come after."""
    monkeypatch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", True)
    monkeypatch.setattr(replica, "add_port_to_grpc_server", replica.add_port_to_grpc_server)
    # Set and taken away again, so that what is set by a test does not stay.
    monkeypatch.setenv("VLLM_HOST_IP", "")
    monkeypatch.delenv("VLLM_HOST_IP")
