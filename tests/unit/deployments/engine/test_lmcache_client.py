"""An LMCache server that is not there yet, and what it is not told."""

import socket
import threading
import time

import pytest
from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector

from deployments.engine.lmcache_connector import ResilientMPConnector
from deployments.node.lmcache_server import wait_for_server


def test_an_engine_waits_for_a_server_that_starts_beside_it() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        host, port = server.getsockname()
        with pytest.raises(RuntimeError, match=rf"no LMCache server at {host}:{port} after 0.2 s"):
            wait_for_server(host, port, timeout_s=0.2)
        begun_s = time.monotonic()
        threading.Timer(0.5, server.listen).start()
        wait_for_server(host, port, timeout_s=30)
        assert time.monotonic() - begun_s > 0.4


def test_the_server_is_told_nothing_for_its_metrics() -> None:
    """The name is LMCache's: if it changes, every turn sends its whole prompt again."""
    name = "_report_block_allocation_deltas"
    assert name in LMCacheMPConnector.build_connector_meta.__code__.co_names
    assert getattr(ResilientMPConnector, name) is not getattr(LMCacheMPConnector, name)
