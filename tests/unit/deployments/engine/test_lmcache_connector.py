"""LMCache's connector when the server is not there yet, or a forward pass was broken off."""

import socket
import threading
import time

import pytest


def test_an_engine_waits_for_a_server_that_starts_beside_it() -> None:
    from deployments.engine.lmcache_connector import _wait_for_server

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        host, port = server.getsockname()
        with pytest.raises(RuntimeError, match=rf"no LMCache server at {host}:{port} after 0.2 s"):
            _wait_for_server(host, port, timeout_s=0.2)
        begun_s = time.monotonic()
        threading.Timer(0.5, server.listen).start()
        _wait_for_server(host, port, timeout_s=30)
        assert time.monotonic() - begun_s > 0.4


def test_a_broken_forward_pass_stores_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM calls wait_for_save in a ``finally``; half-computed KV must not get out."""
    from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector

    from deployments.engine.lmcache_connector import ResilientMPConnector

    stores = []
    # The server is not asked at all: what counts is whether a store would begin.
    monkeypatch.setattr(LMCacheMPConnector, "wait_for_save", lambda self: stores.append(self))
    connector = object.__new__(ResilientMPConnector)
    connector.worker_adapter = type("Adapter", (), {"store_futures": {}})()

    def forward() -> None:
        try:
            raise SystemExit
        finally:
            connector.wait_for_save()

    with pytest.raises(SystemExit):
        forward()
    assert stores == []
    connector.wait_for_save()
    assert stores == [connector]
