"""Loaded into vLLM's own tests: their servers are the one that runs, and outcomes are written down.

Of those tests, only the ones that speak to a server are run. This is no module of ConServe's tests:
in the process that loads it, `tests` is vLLM's.
"""

import json
import os
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from vllm.transformers_utils import repo_utils

from tests import utils

_URL = urlsplit(os.environ["CONSERVE_SUITE_URL"])
_OUTCOMES = Path(os.environ["CONSERVE_SUITE_OUTCOMES"])
_FOLDER = "tests/entrypoints/"
_outcomes: dict[str, dict[str, object]] = {}


class _Running(utils.RemoteOpenAIServer):
    """The server that runs, whatever arguments one was wanted with."""

    def __init__(self, *_: object, **__: object) -> None:
        self.uds = None
        self.host, self.port = _URL.hostname, _URL.port

    def _shutdown(self) -> None:
        pass


class _NoHub:
    """Adapters are named, and not loaded: there is no place to download them from."""

    def snapshot_download(self, **_: object) -> str:
        return "not-downloaded"


# Before the test modules take it from there by name.
utils.RemoteOpenAIServer = _Running
repo_utils.hf_api = _NoHub


def _speaks_to_a_server(item: pytest.Item) -> bool:
    if "watermarked" in item.name:
        return False  # It wants a server with `--watermark-config`.
    function = getattr(item, "function", None)
    fixtures = getattr(item, "fixturenames", [])
    return bool({"server", "client", "tool_use_server"}.intersection(fixtures)) or (
        function is not None and "RemoteOpenAIServer" in function.__code__.co_names
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what tests vLLM's code in this process."""
    others = [item for item in items if not _speaks_to_a_server(item)]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A case passes if nothing of it failed, and it was run."""
    case = report.nodeid.removeprefix(_FOLDER)
    if report.outcome == "passed":
        if report.when == "call":
            _outcomes[case] = {"passed": True, "message": ""}
        return
    crash = getattr(report.longrepr, "reprcrash", None)
    message = crash.message if crash is not None else str(report.longrepr)
    _outcomes[case] = {"passed": False, "message": f"{report.when} {report.outcome}: {message}"}


def pytest_sessionfinish() -> None:
    """Hand the outcomes over."""
    _OUTCOMES.write_text(json.dumps(_outcomes))
