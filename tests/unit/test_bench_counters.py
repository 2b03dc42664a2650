"""What servers and GPUs count of a run, and what is said where they do not."""

from typing import Any

import pynvml
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Counter as Counted

from benchmarks import gpus
from benchmarks.counters import NAMES, ServerFigures, read, rise, server_figures
from conserve.conversations import ConversationTable
from conserve.metrics import Metrics
from conserve.placement import ConversationPlacement
from conserve.waiting import WaitingLine


def test_counters_are_summed_over_engines() -> None:
    registry = CollectorRegistry()
    hits = Counted("vllm:prefix_cache_hits", "Tokens.", ["engine"], registry=registry)
    hits.labels("0").inc(30)
    hits.labels("1").inc(12)
    Counted("unrelated", "No.", registry=registry).inc(5)
    page = generate_latest(registry).decode()
    assert read(page) == {"vllm:prefix_cache_hits_total": 42.0}


def test_the_names_are_those_that_conserve_has() -> None:
    table = ConversationTable(ConversationPlacement(), idle_timeout_s=60)
    page = Metrics(table, WaitingLine(limit=3, timeout_s=60)).render().decode()
    assert read(page) == {name: 0.0 for name in NAMES if name.startswith("conserve_")}


@pytest.mark.parametrize("page", ["", "<html>Not Found</html>", "other_total 3\n", "a{ 3\n"])
def test_a_page_without_these_counters(page: str) -> None:
    assert read(page) is None


def test_what_a_run_added() -> None:
    before = {"a": 5.0, "b": 1.0}
    assert rise(before, {"a": 7.0, "b": 1.0, "new": 3.0}) == {"a": 2.0, "b": 0.0, "new": 3.0}
    # The server was started again.
    assert rise(before, {"a": 4.0, "b": 9.0}) is None
    assert rise(None, before) is None
    assert rise(before, None) is None


def test_figures() -> None:
    counted = {
        "conserve_handoffs_total": 4.0,
        "conserve_handoff_tokens_total": 5500.0,
        "conserve_prefiller_loaded_tokens_total": 500.0,
        "conserve_later_prefills_total": 2.0,
        "conserve_moves_total": 0.0,
        "conserve_cold_prefill_tokens_total": 6100.0,
    }
    found = server_figures(counted, conversations=5, kv_bytes_per_token=1024.0)
    assert found == ServerFigures(
        handoffs=4.0,
        handoff_tokens=6000.0,
        handoff_tokens_per_conversation=1200.0,
        handoff_bytes=6000 * 1024,
        later_prefills=2.0,
        moves=0.0,
        cold_prefill_tokens=6100.0,
    )
    assert server_figures(counted, 5).handoff_bytes is None
    assert server_figures(counted, 0).handoff_tokens_per_conversation is None
    assert server_figures(None, 5, 1024.0) == ServerFigures()

    vllm = {"vllm:prefix_cache_hits_total": 30.0, "vllm:prefix_cache_queries_total": 40.0}
    assert server_figures(vllm, 5) == ServerFigures(prefix_cache_share=0.75)
    assert server_figures({**vllm, "vllm:prefix_cache_queries_total": 0.0}, 5) == ServerFigures()


class _Driver:
    """NVIDIA's driver on a machine with two GPUs, as far as it is asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = 0
        for name in ("Init", "Shutdown"):
            monkeypatch.setattr(pynvml, f"nvml{name}", getattr(self, name.lower()))
        monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 2)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetName", "GPU {}".format)
        self.energy = monkeypatch

    def init(self) -> None:
        self.open += 1

    def shutdown(self) -> None:
        self.open -= 1

    def counts(self, energy_mj: Any) -> None:
        self.energy.setattr(pynvml, "nvmlDeviceGetTotalEnergyConsumption", energy_mj)


def test_gpus_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = _Driver(monkeypatch)
    driver.counts(lambda index: 1500 + index)
    assert gpus.names() == ["GPU 0", "GPU 1"]
    assert gpus.energy_j() == pytest.approx(3.001)
    assert driver.open == 0


def test_a_gpu_that_does_not_count_energy(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = _Driver(monkeypatch)

    def refuse(error: int) -> Any:
        def raise_(index: int) -> int:
            raise pynvml.NVMLError(error)

        return raise_

    driver.counts(refuse(pynvml.NVML_ERROR_NOT_SUPPORTED))
    assert gpus.energy_j() is None
    # Whatever else is wrong is not taken for that.
    driver.counts(refuse(pynvml.NVML_ERROR_GPU_IS_LOST))
    with pytest.raises(pynvml.NVMLError_GpuIsLost):
        gpus.energy_j()
    assert driver.open == 0


@pytest.mark.parametrize(
    "error", [pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED]
)
def test_a_machine_without_a_driver(error: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise pynvml.NVMLError(error)

    monkeypatch.setattr(pynvml, "nvmlInit", init)
    assert gpus.names() == []
    assert gpus.energy_j() is None
