"""Tests that LMCache servers rest when they are idle, and lock what they may."""

import inspect
import logging
import subprocess
import sys
from types import SimpleNamespace

import pytest
from lmcache.v1.multiprocess.modules.lookup import LookupModule
from lmcache.v1.multiprocess.native_completion import DeviceHostFuncDispatcher

from deployments.node.lmcache_main import (
    let_progress_thread_sleep,
    look_less_often_for_copies,
    nixl_api,
    say_nothing_of_short_prompts,
)
from tests.checkout import ROOT


def test_an_agents_progress_thread_may_sleep() -> None:
    """Its Python API asks for a delay of none, which means a whole core."""
    api = nixl_api()
    original = api.nixlBind.nixlAgentConfig
    let_progress_thread_sleep(api)
    try:
        config = api.nixlBind.nixlAgentConfig()
        config.pthrDelay = 0
        assert config.pthrDelay == 10_000
        # What is written is what the compiled side reads.
        assert original.pthrDelay.__get__(config) == 10_000
        config.pthrDelay = 5
        assert config.pthrDelay == 5
        agent = api.nixl_agent("sleeps", api.nixl_agent_config(backends=["UCX"]))
        assert agent.get_agent_metadata()
    finally:
        api.nixlBind.nixlAgentConfig = original


def test_a_dispatcher_may_rest() -> None:
    start = DeviceHostFuncDispatcher.__init__
    before = start.__defaults__
    assert list(inspect.signature(start).parameters) == ["self", "drain_interval_seconds"]
    # As it is called where LMCache makes its own.
    assert DeviceHostFuncDispatcher().interval == 0.005
    look_less_often_for_copies()
    try:
        assert DeviceHostFuncDispatcher().interval == 1.0
    finally:
        start.__defaults__ = before


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
        say_nothing_of_short_prompts()
        assert said("short") == []
        assert said("unknown") == ["Session unknown not found, skipping touch"]
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
