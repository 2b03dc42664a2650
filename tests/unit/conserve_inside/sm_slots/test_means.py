"""By what an engine keeps to its SMs: chosen before it looks at its GPU."""

from pathlib import Path

import pytest

from conserve_inside.sm_slots import means
from conserve_inside.sm_slots.means import MpsPercentage, NoSms, means_of, mps_runs, prepare
from hetero import green_contexts
from hetero.green_contexts import GreenContexts, SmsUnavailable
from hetero.sm_units import SmSlots, sm_granularity
from tests.unit.hetero.cuda_standin import Driver

PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
OLD = "the driver is for CUDA 12.4, and green contexts want 12.8 (driver 570) or newer"


@pytest.fixture
def pipes(tmp_path: Path) -> Path:
    return tmp_path / "nvidia-mps"


def start_mps(pipes: Path) -> None:
    pipes.mkdir()
    (pipes / "control").touch()


def _answers(monkeypatch: pytest.MonkeyPatch, why_not: str) -> None:
    monkeypatch.setattr(green_contexts, "why_not", lambda: why_not)


def test_green_contexts_want_all_sms_to_split(monkeypatch: pytest.MonkeyPatch, pipes: Path) -> None:
    """Under MPS a percentage would leave them fewer than the ledger counts."""
    _answers(monkeypatch, "")
    start_mps(pipes)
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(pipes), PERCENTAGE: "30"}
    assert prepare(3, environment) == ""
    assert PERCENTAGE not in environment
    monkeypatch.setattr(green_contexts, "load_driver", Driver)
    slots = SmSlots(132, sm_granularity((9, 0)))
    assert isinstance(means_of(slots, 0, ""), GreenContexts)


def test_without_them_mps_holds_the_process(monkeypatch: pytest.MonkeyPatch, pipes: Path) -> None:
    _answers(monkeypatch, OLD)
    start_mps(pipes)
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(pipes)}
    assert prepare(3, environment) == OLD
    assert environment[PERCENTAGE] == "30"
    means = means_of(SmSlots(132, sm_granularity((9, 0))), 0, OLD)
    assert isinstance(means, MpsPercentage)
    assert means.stream(range(3)) is None


def test_with_neither_it_is_said_what_to_do(monkeypatch: pytest.MonkeyPatch, pipes: Path) -> None:
    _answers(monkeypatch, OLD)
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(pipes)}
    assert not mps_runs(environment)
    with pytest.raises(SmsUnavailable, match=r"CUDA 12\.4.*no MPS control daemon in") as refused:
        prepare(3, environment)
    assert "or leave sm_slots out" in str(refused.value)
    assert PERCENTAGE not in environment


def test_cpus_have_no_sms() -> None:
    assert "no SMs" in NoSms().name
    assert NoSms().stream(range(0)) is None


def test_cuda_s_own_folder_is_looked_at_unless_another_is_named() -> None:
    assert means._pipe_directory({}) == Path("/tmp/nvidia-mps")
