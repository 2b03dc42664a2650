"""Tests that LMCache servers log no needless warnings, and lock what they may."""

import logging
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from fastapi import FastAPI
from fastapi.testclient import TestClient
from lmcache.v1.multiprocess.modules.lookup import LookupModule

from deployments.node.lmcache_main import (
    HEALTH_PATH,
    offer_health,
    say_nothing_of_short_prompts,
)
from tests.checkout import ROOT


def test_a_prompt_shorter_than_a_chunk_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    """LMCache's own code is called at the end of such a turn, and of one that it never heard of."""
    sessions = {"short": SimpleNamespace(lookup_ipc_key=None)}
    context = SimpleNamespace(
        event_bus=SimpleNamespace(publish=lambda event: None),
        session_manager=SimpleNamespace(remove=sessions.get),
    )
    module = object.__new__(LookupModule)
    module._ctx = context

    def said(request_id: str) -> list[str]:
        caplog.clear()
        module.end_session(request_id)
        return [record.getMessage() for record in caplog.records]

    log = logging.getLogger(LookupModule.__module__)
    before = list(log.filters)
    log.addHandler(caplog.handler)
    try:
        assert said("short") == ["Session short has no lookup ipc key, skipping touch"]
        assert said("later turn") == ["Session later turn not found, skipping touch"]
        say_nothing_of_short_prompts()
        assert said("short") == said("later turn") == []
    finally:
        log.filters[:] = before
        log.removeHandler(caplog.handler)


def test_a_server_locks_as_much_as_it_may() -> None:
    """Without privileges a process may raise its own limit to the hard one."""
    code = (
        "import os, resource\n"
        "from deployments.node.lmcache_main import lock_as_much_as_allowed\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (4096, 65536))\n"
        "os.getuid() or os.setuid(65534)\n"
        "lock_as_much_as_allowed()\n"
        "print(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout.strip(), done.returncode) == ("65536", 0), done.stderr


def test_a_server_whose_copies_fail_is_not_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy is real, and fails here for want of CUDA; LMCache's own check goes on after it."""
    app = FastAPI()
    offer_health(app)
    client = TestClient(app, raise_server_exceptions=False)
    assert client.get(HEALTH_PATH).status_code == 503
    app.state.engine = object()
    assert client.get(HEALTH_PATH).status_code == 200
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    in_use: set[int] = set()
    monkeypatch.setattr(
        torch._C, "_cuda_hasPrimaryContext", lambda gpu: gpu in in_use, raising=False
    )
    assert client.get(HEALTH_PATH).status_code == 200
    in_use.add(1)
    assert client.get(HEALTH_PATH).status_code == 500
