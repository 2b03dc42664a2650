"""What servers and GPUs count of a run, and what is said where they do not."""

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Counter as Counted

from conserve_lab.counters import NAMES, ServerFigures, read, rise, server_figures
from conserve_lab.machine import gpu_energy_j, gpu_names
from deployments.table.metrics import Metrics
from hetero.nvml import GpuLost
from tests.nvml import standin
from tests.nvml.standin import Machine


def test_counters_are_summed_over_engines() -> None:
    registry = CollectorRegistry()
    hits = Counted("vllm:prefix_cache_hits", "Tokens.", ["engine"], registry=registry)
    hits.labels("0").inc(30)
    hits.labels("1").inc(12)
    Counted("unrelated", "No.", registry=registry).inc(5)
    page = generate_latest(registry).decode()
    assert read(page) == {"vllm:prefix_cache_hits_total": 42.0}


def test_the_names_are_those_that_conserve_has() -> None:
    page = Metrics().render().decode()
    assert read(page) == {name: 0.0 for name in NAMES if name.startswith("conserve_")}


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


def test_each_tier_has_its_tokens_per_joule() -> None:
    """As a page of ours says them: by role, phase and tier."""
    page = """
# TYPE conserve_gpu_energy_joules_total counter
conserve_gpu_energy_joules_total{phase="cold_prefill",role="prefiller",tier="fast"} 100.0
conserve_gpu_energy_joules_total{phase="tail",role="decoder",tier="slow"} 300.0
conserve_gpu_energy_joules_total{phase="tail",role="decoder",tier="fast"} 50.0
# TYPE conserve_computed_tokens_total counter
conserve_computed_tokens_total{tier="fast"} 600.0
conserve_computed_tokens_total{tier="slow"} 900.0
"""
    before = read(page)
    assert before is not None
    after = {name: value * 3 for name, value in before.items()}
    figures = server_figures(rise(before, after), 5)
    assert figures.tier_energy_j == {"fast": 300, "slow": 600}
    assert figures.tier_tokens_per_j == {"fast": 4, "slow": 3}
    assert server_figures({}, 5).tier_energy_j == {}


def test_gpus_of_this_machine(machine: Machine) -> None:
    before_j = gpu_energy_j()
    assert before_j is not None
    assert gpu_names() == ["NVIDIA A40", "NVIDIA A40"]
    machine.advance(100)
    after_j = gpu_energy_j()
    assert after_j is not None
    assert after_j - before_j == pytest.approx(2 * 30 * 100)


def test_a_gpu_that_does_not_count_energy(machine: Machine) -> None:
    machine.gpus[1].unsupported |= standin.NO_ENERGY
    assert gpu_energy_j() is None
    # Whatever else is wrong is not taken for that, nor left out of the sum.
    machine.gpus[1].unsupported = 0
    machine.gpus[1].lost = 1
    with pytest.raises(GpuLost):
        gpu_energy_j()
