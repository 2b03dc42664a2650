"""A worker that finds its predecessor's memory on its GPU ends, or waits for it."""

import time
from types import SimpleNamespace

import pytest
from vllm.v1.worker import gpu_worker, utils

from deployments.node.lmcache_server import REAPED_S
from deployments.upstream.impatient_memory_check import TIMEOUT_S

GIB = 1 << 30
WANTED = SimpleNamespace(gpu_memory_utilization=0.5)


@pytest.fixture(autouse=True)
def as_vllm_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_worker, "request_memory", utils.request_memory)


class Snapshot:
    """VLLM's look at a GPU of 48 GiB, on which a killed engine has 40 for a while."""

    device_ = "cuda:0"
    total_memory = 48 * GIB

    def __init__(self, monkeypatch: pytest.MonkeyPatch, freed_after_s: float) -> None:
        self._freed_after_s, self.now_s = freed_after_s, 0.0
        self.measure()
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(time, "sleep", self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def measure(self) -> None:
        self.free_memory = (8 if self.now_s < self._freed_after_s else 47) * GIB


def test_vllm_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="Free memory on device"):
        gpu_worker.request_memory(Snapshot(monkeypatch, 12.0), WANTED)


@pytest.mark.usefixtures("patched")
def test_a_patched_worker_takes_the_memory_that_its_predecessor_gives_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    snapshot = Snapshot(monkeypatch, 12.0)
    assert gpu_worker.request_memory(snapshot, WANTED, 4 * GIB) == 20 * GIB
    assert snapshot.now_s == 12.0
    # There is room now.
    assert gpu_worker.request_memory(snapshot, WANTED) == 24 * GIB
    assert snapshot.now_s == 12.0


@pytest.mark.usefixtures("patched")
def test_a_patched_worker_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = Snapshot(monkeypatch, 1000.0)
    with pytest.raises(ValueError, match="Free memory on device"):
        gpu_worker.request_memory(snapshot, WANTED)
    # LMCache's server takes that long to miss an engine.
    assert snapshot.now_s == TIMEOUT_S > REAPED_S + 20


@pytest.mark.usefixtures("patched")
def test_more_than_there_is_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = Snapshot(monkeypatch, 12.0)
    with pytest.raises(ValueError, match="Free memory on device"):
        gpu_worker.request_memory(snapshot, SimpleNamespace(gpu_memory_utilization=1.5))
    assert snapshot.now_s == 0.0
