"""A call by an engine's client, which reaches the core and not its scheduler, or both."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCore, EngineCoreProc

from deployments.upstream.unreachable_scheduler import offer

NAME = "conserve_tested"


def called(monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    """Return what a core says to a utility call, by vLLM's own code."""
    core = object.__new__(EngineCoreProc)
    core.scheduler = SimpleNamespace(waiting=3)
    said: list[Any] = []
    core.output_queue = SimpleNamespace(put_nowait=said.append)
    monkeypatch.setattr(core, "_reject_utility_in_shutdown", lambda *_: False)
    core._handle_client_request(EngineCoreRequestType.UTILITY, (0, 1, name, (4,)))
    ((_, outputs),) = said
    return outputs.utility_output


@pytest.mark.parametrize("name", [NAME, "scheduler.add", "scheduler_rpc"])
def test_vllm_has_no_call_for_schedulers(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert "has no attribute" in called(monkeypatch, name).failure_message


def test_a_patched_core_passes_it_to_its_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineCore, NAME, None, raising=False)
    offer(NAME, lambda scheduler, asked: scheduler.waiting + asked)
    output = called(monkeypatch, NAME)
    assert output.failure_message is None
    assert output.result.result == 7
