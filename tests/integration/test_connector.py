"""What LMCache's connector does when a forward pass was broken off."""

import pytest


def test_a_broken_forward_pass_stores_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM calls wait_for_save in a ``finally``; half-computed KV must not get out."""
    from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector

    from deployments.lmcache_connector import ResilientMPConnector

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
