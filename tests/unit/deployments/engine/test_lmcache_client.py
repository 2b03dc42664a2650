"""LMCache's client where the server is not there yet, only busy, or has forgotten its worker."""

import socket
import threading
import time
from typing import Any

import pytest


class Client:
    """LMCache's, as far as it is asked for anything here; answers come from a list."""

    def __init__(self, answers: list[Any]) -> None:
        self.answers = answers

    def ping(self, instance_id: int | None) -> Any:
        return self.answers.pop()

    def register_kv_cache(self, *given: Any) -> Any:
        return self.answers.pop()

    def register_kv_cache_engine_driven_context(self, *given: Any) -> Any:
        return self.answers.pop()


def test_an_engine_waits_for_a_server_that_starts_beside_it() -> None:
    from deployments.engine.lmcache_client import wait_for_server

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        host, port = server.getsockname()
        with pytest.raises(RuntimeError, match=rf"no LMCache server at {host}:{port} after 0.2 s"):
            wait_for_server(host, port, timeout_s=0.2)
        begun_s = time.monotonic()
        threading.Timer(0.5, server.listen).start()
        wait_for_server(host, port, timeout_s=30)
        assert time.monotonic() - begun_s > 0.4


def test_a_busy_server_is_not_taken_for_lost() -> None:
    """Taken for lost, it is asked for nothing, and first prompts are computed twice."""
    from lmcache.integration.vllm.vllm_multi_process_adapter import send_ping
    from lmcache.v1.multiprocess.futures import MessagingFuture

    from deployments.engine.lmcache_client import be_patient

    answers: list[MessagingFuture[bool]] = []

    client = Client(answers)
    be_patient(client, 30)
    late, broken = MessagingFuture(), MessagingFuture()
    answers.append(late)
    threading.Timer(0.3, lambda: late.set_result(True)).start()
    assert send_ping(client, timeout=0.01)
    # A connection that breaks ends the wait, and a server that hangs is lost after a while.
    answers.append(broken)
    threading.Timer(0.05, lambda: broken.set_exception(TimeoutError("lost"))).start()
    assert not send_ping(client, timeout=0.01)
    answers.append(MessagingFuture())
    hasty = Client(answers)
    be_patient(hasty, 0.05)
    assert not send_ping(hasty, timeout=0.01)


def test_a_registration_may_take_longer_than_a_transfer() -> None:
    """The server may have to start CUDA for it."""
    from lmcache.v1.multiprocess.futures import MessagingFuture

    from deployments.engine.lmcache_client import be_patient

    late: MessagingFuture[str] = MessagingFuture()
    client = Client([late])
    be_patient(client)
    threading.Timer(0.3, lambda: late.set_result("registered")).start()
    assert client.register_kv_cache(1).result(timeout=0.01) == "registered"


@pytest.mark.parametrize("registers", [True, False])
def test_a_worker_that_the_server_may_have_forgotten_registers_again(registers: bool) -> None:
    """And does not, as long as it cannot have been."""
    from lmcache.integration.vllm.vllm_multi_process_adapter import send_ping
    from lmcache.v1.multiprocess.futures import MessagingFuture

    from deployments.engine.lmcache_client import register_after_silence
    from deployments.node.lmcache_server import REAP_TIMEOUT_S

    now_s, registered = [100.0], []

    def register() -> bool:
        registered.append(now_s[0])
        return registers

    client = Client([])
    register_after_silence(client, register, lambda: now_s[0])

    def ping(after_s: float, took_s: float = 0.0, alive: bool = True) -> bool:
        now_s[0] += after_s
        answer: MessagingFuture[bool] = MessagingFuture()
        client.answers.append(answer)
        result = answer.result

        def late(timeout: float | None = None) -> bool:
            now_s[0] += took_s
            return result(timeout)

        answer.result = late
        if alive:
            answer.set_result(True)
        return bool(send_ping(client, timeout=0.01))

    # The first is counted from the registration.
    assert ping(REAP_TIMEOUT_S - 2, 1)
    assert ping(1)
    assert registered == []
    # A server that does not answer is lost, which LMCache itself sees to.
    assert not ping(1, alive=False)
    # It may have handled the one before when that was sent, and this one when it is answered.
    assert ping(REAP_TIMEOUT_S - 2, 1)
    assert ping(REAP_TIMEOUT_S - 1, 2) is registers
    assert len(registered) == 1
    assert ping(1)
    assert len(registered) == 1


def test_the_server_hears_of_the_end_of_what_it_was_asked_about() -> None:
    from deployments.engine.lmcache_client import say_less

    said: list[tuple[str, str]] = []

    class Adapter:
        def maybe_submit_lookup_request(self, request_id: str, token_ids: list[int]) -> None:
            said.append(("asked", request_id))

        def end_session(self, request_id: str) -> None:
            said.append(("ended", request_id))

    adapter = Adapter()
    say_less(adapter)
    for _ in range(2):  # It is asked until the answer is there.
        adapter.maybe_submit_lookup_request("cold", token_ids=[1, 2])
    adapter.end_session("later turn")
    adapter.end_session("cold")
    adapter.end_session("cold")
    assert said == [("asked", "cold"), ("asked", "cold"), ("ended", "cold")]


def test_the_server_is_told_nothing_for_its_metrics() -> None:
    """The name is LMCache's: if it changes, every turn sends its whole prompt again."""
    from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector

    from deployments.engine.lmcache_connector import ResilientMPConnector

    name = "_report_block_allocation_deltas"
    assert name in LMCacheMPConnector.build_connector_meta.__code__.co_names
    assert getattr(ResilientMPConnector, name) is not getattr(LMCacheMPConnector, name)
