"""What LMCache's connector does when a forward pass was broken off."""

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


@pytest.mark.anyio
@pytest.mark.parametrize("server_fails", [True, False])
@pytest.mark.parametrize("engine_fails", [True, False])
async def test_an_engine_that_fails_for_lack_of_a_server_says_so(
    monkeypatch: pytest.MonkeyPatch, server_fails: bool, engine_fails: bool
) -> None:
    from deployments.engine.engine import EngineServer, LLMServer

    class Node:
        async def wait_until_healthy(self) -> None:
            if server_fails:
                raise RuntimeError("port 7610 is in use")

    async def load(self: object, config: object) -> None:
        if engine_fails:
            raise ValueError("engine core initialization failed")

    class Server(EngineServer):
        def __del__(self) -> None:
            """Serve would await an engine's; nothing was started here."""

    monkeypatch.setattr(LLMServer, "__init__", load)
    server = object.__new__(Server)
    server._node = Node()
    if server_fails:
        with pytest.raises(RuntimeError, match="port 7610 is in use"):
            await server._load_engine(None)
    elif engine_fails:
        with pytest.raises(ValueError, match="engine core"):
            await server._load_engine(None)
    else:
        await server._load_engine(None)
