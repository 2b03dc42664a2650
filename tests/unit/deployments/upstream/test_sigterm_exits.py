"""A signal to a worker of Ray's: its handler as Ray installs it, without a cluster."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray._private import worker

from deployments.upstream.sigterm_exits import at_sigterm

SIGTERM = 15


@pytest.fixture
def signalled(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """The handler that a worker's main thread installs."""
    handlers: list[Any] = []
    monkeypatch.setattr(worker.ray._private.utils, "set_sigterm_handler", handlers.append)
    core = SimpleNamespace(run_task_loop=lambda: None)
    with pytest.raises(SystemExit):
        worker.Worker.main_loop(SimpleNamespace(core_worker=core))
    return lambda: handlers[0](SIGTERM, None)


def test_a_worker_ends_at_once(signalled: Callable[[], None]) -> None:
    with pytest.raises(SystemExit):
        signalled()


def test_a_patched_worker_is_told_first(signalled: Callable[[], None]) -> None:
    told: list[str] = []
    at_sigterm(lambda: told.append("once"))
    signalled()
    assert told == ["once"]
    with pytest.raises(SystemExit):
        signalled()
    assert told == ["once"]
