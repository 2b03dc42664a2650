"""The plugin that has a CPU engine's processes wait asleep."""

import logging
import time
from importlib.metadata import entry_points

import pytest
from vllm.distributed.device_communicators import shm_broadcast
from vllm.platforms import current_platform

from deployments.engine import engine_wait


@pytest.fixture
def spinning(monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM's own way of waiting, also afterwards."""
    monkeypatch.setattr(shm_broadcast, "sched_yield", _spin)


def _spin() -> None:
    pass


def test_vllm_finds_the_plugin() -> None:
    found = {plugin.name: plugin for plugin in entry_points(group="vllm.general_plugins")}
    assert found["conserve_engine_wait"].load() is engine_wait.register


@pytest.mark.usefixtures("spinning")
def test_a_cpu_engine_waits_asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    slept_s: list[float] = []
    monkeypatch.setattr(time, "sleep", slept_s.append)
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: True)
    engine_wait.register()
    engine_wait.register()
    shm_broadcast.sched_yield()
    assert len(slept_s) == 1
    assert 0 < slept_s[0] < 0.001


@pytest.mark.usefixtures("spinning")
def test_other_engines_wait_as_vllm_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    engine_wait.register()
    assert shm_broadcast.sched_yield is _spin


@pytest.mark.usefixtures("spinning")
@pytest.mark.parametrize(("waiting", "asleep"), [(2, False), (3, True)])
def test_engines_on_gpus_wait_asleep_where_they_are_more_than_cpus(
    monkeypatch: pytest.MonkeyPatch, waiting: int, asleep: bool
) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    monkeypatch.setattr(engine_wait, "usable_cpus", lambda: 2.0)
    monkeypatch.setenv(engine_wait.WAITING, str(waiting))
    engine_wait.register()
    assert (shm_broadcast.sched_yield is not _spin) == asleep


@pytest.mark.usefixtures("spinning")
def test_an_unknown_vllm_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: True)
    monkeypatch.delattr(shm_broadcast, "sched_yield")
    engine_wait.register()
    assert "engine_wait.py" in caplog.text
    assert not hasattr(shm_broadcast, "sched_yield")
