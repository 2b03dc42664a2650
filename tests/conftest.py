"""Fixtures of all tests."""

import os
import shutil
from functools import partial
from pathlib import Path

import psutil
import pytest
from hypothesis import settings

from tests import machines

# So that an assertion in what tests share says as much when it fails as one in a test.
pytest.register_assert_rewrite("tests.acceptance", "tests.engines", "tests.nvml", "tests.unit")

# How long an example takes is the machine's business.
settings.register_profile("conserve", deadline=None)
# What every change has to pass tries the same examples each time; `make test-all` looks for others.
settings.register_profile("same", deadline=None, derandomize=True)
settings.load_profile("conserve")


@pytest.fixture
def anyio_backend() -> str:
    """Asynchronous tests run on asyncio."""
    return "asyncio"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of tests that are run by themselves, and those for other machines."""
    group = parser.getgroup("conserve")
    group.addoption("--cpu", choices=machines.VIEWS, help="what vLLM takes this CPU for")
    group.addoption("--no-compiler", action="store_true", help="leave compilers out of PATH")
    group.addoption("--fuzz-cases", type=int, default=300, help="requests to try (%(default)s)")
    group.addoption("--fuzz-seed", type=int, default=0, help="which requests (%(default)s)")
    group.addoption("--router-kills", type=int, default=8, help="under agents (%(default)s)")
    group.addoption("--gpu-page", type=Path, help="where `make test-gpu` writes its page")
    group.addoption("--vllm", type=Path, help="a checkout of vLLM; none: pip gets its source")
    group.addoption("--openresponses", type=Path, help="a clone of Open Responses; none: clone it")


def pytest_configure(config: pytest.Config) -> None:
    """Make this machine look like the one that was asked for."""
    if config.option.cpu:
        machines.view_cpu(config.option.cpu)
    if config.option.no_compiler:
        config.add_cleanup(partial(shutil.rmtree, machines.hide_compilers()))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return one worker a core: with vLLM imported, each takes up to 1.5 GB of memory."""
    room = psutil.virtual_memory().available // (2 << 30)
    return max(1, min(len(os.sched_getaffinity(0)), room, 8))
