"""Runs tests on a GPU in the order of `steps`, and writes the page, as a plugin of pytest."""

import datetime
import logging
import platform
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from conserve.versions import version_of
from hetero.nvml import Nvml
from tests.acceptance.gpu.steps import NAMES, Figure, Result, Results
from tests.checkout import ROOT

# Shown as tests run.
seen = logging.getLogger("tests.gpu")
_PACKAGES = ("ray", "vllm", "torch", "lmcache")


class GpuSteps:
    """Tests marked `step(NAME)` in order; those that a failed step makes pointless are skipped.

    Args:
        missing: why no test can run here; empty: they can.
        page: the file to write; None: a new one in build/gpu-checks.
    """

    def __init__(self, missing: str, page: Path | None) -> None:
        self._missing = missing
        self._page = page
        self._results = Results()
        self._title, self._about = "", ""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            if name := _step_of(item):
                item.user_properties.append(("step", name))
        items.sort(key=lambda item: NAMES.index(_step_of(item) or NAMES[0]))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if name := _step_of(item):
            if why := self._missing or self._results.why_not(name):
                pytest.skip(why)
            if not self._title:
                self._look()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        told = report.user_properties
        if not (names := [str(value) for name, value in told if name == "step"]):
            return
        result = self._results.setdefault(names[0], Result())
        result.seconds += report.duration
        if report.failed:
            result.failed.append(f"`{report.nodeid.rpartition('::')[2]}`: {_reason(report)}")
            result.broken |= report.when == "setup"
        elif report.skipped:
            result.left_out[_reason(report)] = None
        elif report.when == "call":
            result.passed += 1
        if report.when == "teardown":
            result.figures += [one for _, one in told if isinstance(one, Figure)]
            # Each time, so that a run that is cut short leaves what it has seen.
            if self._title and self._page is not None:
                self._page.parent.mkdir(parents=True, exist_ok=True)
                self._page.write_text(self._results.page(self._title, self._about))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._title:
            terminalreporter.write_line(f"conserve: what was seen is in {self._page}")

    @pytest.fixture
    def figure(self, request: pytest.FixtureRequest) -> Callable[..., None]:
        """Put a figure on the page: its name, its value, and its unit."""

        def put(name: str, value: float | str, unit: str = "") -> None:
            found = Figure(name, value, unit)
            request.node.user_properties.append(("figure", found))
            seen.info("%s: %s", name, found.shown)

        return put

    def _look(self) -> None:
        with Nvml() as nvml:
            gpus = nvml.inventory()
            driver, (major, minor) = nvml.driver_version(), nvml.cuda_version()
        now = datetime.datetime.now()
        names = ", ".join(dict.fromkeys(gpu.name for gpu in gpus))
        self._title = f"{now:%Y-%m-%d}: {names}"
        command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
        commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        versions = [f"{one} {version_of(one) or 'missing'}" for one in _PACKAGES]
        self._about = (
            f"`make test-gpu` at commit {commit.stdout.strip() or 'unknown'}, {len(gpus)} x "
            f"{names}, driver {driver} (CUDA up to {major}.{minor}), Python "
            f"{platform.python_version()}, {', '.join(versions)}."
        )
        if self._page is None:
            name = re.sub(r"[^\w-]", "-", f"{now:%Y-%m-%d-%H%M}-{names}")
            self._page = ROOT / "build" / "gpu-checks" / f"{name}.md"


def _step_of(item: pytest.Item) -> str:
    marker = item.get_closest_marker("step")
    return str(marker.args[0]) if marker else ""


def _reason(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    said = crash.message if crash else str(report.longrepr)
    return str(said).partition("\n")[0][:200]
