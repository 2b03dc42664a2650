"""A worker whose LMCache server may have forgotten it, as it was silent."""

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from lmcache.integration.vllm.vllm_multi_process_adapter import HeartbeatThread
from lmcache.v1.multiprocess.futures import MessagingFuture

from deployments.upstream import forgotten_worker
from deployments.upstream.forgotten_worker import REAP_TIMEOUT_S


class Worker:
    """A worker's heartbeats, each sent and answered at the given times."""

    def __init__(self, instance_id: int | None = 1) -> None:
        self.now_s = 100.0
        self.registered_s: list[float] = []
        self.can_register = True
        self.healthy = threading.Event()
        self.healthy.set()
        client = SimpleNamespace(ping=self._ping)
        self._beats: Any = HeartbeatThread(client, self.healthy, 0.01, instance_id)
        self._beats.register_recover_callback(self._register)
        self._answers: Iterator[tuple[float, bool]] = iter(())

    def beat(self, after_s: float, took_s: float = 0.0, alive: bool = True) -> None:
        self.now_s += after_s
        self._answers = iter([(took_s, alive)])
        self._beats._execute()

    def _ping(self, instance_id: int | None) -> Any:
        took_s, alive = next(self._answers)
        self.now_s += took_s
        answer: MessagingFuture[bool] = MessagingFuture()
        if alive:
            answer.set_result(True)
        return answer

    def _register(self) -> bool:
        self.registered_s.append(self.now_s)
        return self.can_register


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    worker = Worker()
    monkeypatch.setattr(forgotten_worker, "monotonic", lambda: worker.now_s)
    return worker


def test_it_stays_forgotten(worker: Worker) -> None:
    worker.beat(0)
    worker.beat(REAP_TIMEOUT_S + 1)
    assert worker.healthy.is_set()
    assert not worker.registered_s


@pytest.mark.usefixtures("patched")
def test_patched_it_registers_again(worker: Worker) -> None:
    worker.beat(0)
    worker.beat(REAP_TIMEOUT_S - 2, 1)
    worker.beat(1)
    assert not worker.registered_s
    # The server may have handled the one before when that was sent, and this one when it answers.
    worker.beat(REAP_TIMEOUT_S - 1, 2)
    assert worker.registered_s == [worker.now_s]
    worker.beat(1)
    assert len(worker.registered_s) == 1
    assert worker.healthy.is_set()


@pytest.mark.usefixtures("patched")
def test_patched_it_tries_again_where_that_fails(worker: Worker) -> None:
    worker.can_register = False
    worker.beat(0)
    worker.beat(REAP_TIMEOUT_S)
    assert not worker.healthy.is_set()
    worker.can_register = True
    worker.beat(1)
    assert worker.healthy.is_set()
    assert len(worker.registered_s) == 2


@pytest.mark.usefixtures("patched")
def test_patched_it_leaves_a_lost_server_to_lmcache(worker: Worker) -> None:
    worker.beat(0)
    worker.beat(1, alive=False)
    worker.beat(REAP_TIMEOUT_S)
    assert len(worker.registered_s) == 1
