"""Processes of an engine that wait for each other, spinning or asleep."""

import time

import pytest
from vllm.distributed.device_communicators import shm_broadcast
from vllm.platforms import current_platform

from deployments.upstream import spinning_wait


def sleeps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return how long a reader slept that has read just now and found nothing since."""
    slept_s: list[float] = []
    monkeypatch.setattr(time, "sleep", slept_s.append)
    condition = object.__new__(shm_broadcast.SpinCondition)
    condition.is_reader, condition.last_read, condition.busy_loop_s = True, time.monotonic(), 1
    condition.wait()
    return slept_s


def test_vllm_spins(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any(sleeps(monkeypatch))


def test_a_patched_cpu_engine_waits_asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: True)
    spinning_wait.apply()
    (slept_s,) = sleeps(monkeypatch)
    assert 0 < slept_s < 0.001


@pytest.mark.parametrize(("waiting", "asleep"), [(None, False), (2, False), (3, True)])
def test_engines_on_gpus_wait_asleep_where_they_are_more_than_cpus(
    monkeypatch: pytest.MonkeyPatch, waiting: int | None, asleep: bool
) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    monkeypatch.setattr(spinning_wait, "usable_cpus", lambda: 2.0)
    monkeypatch.delenv(spinning_wait.WAITING, raising=False)
    if waiting is not None:
        monkeypatch.setenv(spinning_wait.WAITING, str(waiting))
    spinning_wait.apply()
    assert any(sleeps(monkeypatch)) == asleep
