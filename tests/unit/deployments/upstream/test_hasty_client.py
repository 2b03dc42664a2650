"""A heartbeat and a registration that a busy LMCache server answers late."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import vllm.platforms
from lmcache.integration.vllm import vllm_multi_process_adapter as adapters
from lmcache.v1.multiprocess.futures import MessagingFuture
from lmcache.v1.multiprocess.transport.zmq_impl.client import ZmqMultiprocessClient

from deployments.upstream import hasty_client

LATE_S = 0.3
REGISTRATION = "register_kv_cache_engine_driven_context"


def _answer(after_s: float | None, failure: Exception | None = None) -> MessagingFuture[Any]:
    answer: MessagingFuture[Any] = MessagingFuture()
    if after_s is not None:
        how = (answer.set_exception, [failure]) if failure else (answer.set_result, [True])
        threading.Timer(after_s, *how).start()
    return answer


def _is_healthy(answer: MessagingFuture[Any], instance_id: int | None = 1) -> bool:
    """Whether a server counts as healthy that answers a heartbeat like this."""
    healthy = threading.Event()
    healthy.set()
    client = SimpleNamespace(ping=lambda instance_id: answer)
    adapters.HeartbeatThread(client, healthy, 0.01, instance_id)._execute()
    return healthy.is_set()


def _register(answer: MessagingFuture[Any]) -> Any:
    queue = SimpleNamespace(submit_request=lambda operation, payloads: answer)
    return getattr(ZmqMultiprocessClient(queue), REGISTRATION)(None).result(timeout=0.01)


def test_lmcache_takes_a_busy_server_for_lost() -> None:
    assert not _is_healthy(_answer(LATE_S))
    with pytest.raises(TimeoutError):
        _register(_answer(LATE_S))


@pytest.mark.usefixtures("patched")
def test_patched_it_waits() -> None:
    """For a server that is lost, it is asked for nothing, and prompts are computed twice."""
    assert _is_healthy(_answer(LATE_S))
    assert _register(_answer(LATE_S)) is True
    # A connection that breaks ends the wait.
    assert not _is_healthy(_answer(0.05, TimeoutError("lost")))


def test_on_a_gpu_workers_wait_longer_than_schedulers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server may still write to the engine's memory."""
    gpu = SimpleNamespace(device_type="cuda")
    monkeypatch.setattr(vllm.platforms, "current_platform", gpu)
    monkeypatch.setattr(hasty_client, "PING_TIMEOUT_S", 0.05)
    hasty_client.apply()
    assert _is_healthy(_answer(LATE_S), instance_id=1)
    assert not _is_healthy(_answer(LATE_S), instance_id=None)
