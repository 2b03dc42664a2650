"""Fixtures of all tests."""

from pathlib import Path

import pytest
from hypothesis import settings

# So that an assertion in what tests share says as much when it fails as one in a test.
pytest.register_assert_rewrite("tests.chaos", "tests.engines", "tests.nvml", "tests.unit")

# How long an example takes is the machine's business.
settings.register_profile("conserve", deadline=None)
settings.load_profile("conserve")


@pytest.fixture
def anyio_backend() -> str:
    """Asynchronous tests run on asyncio."""
    return "asyncio"


def pytest_addoption(parser: pytest.Parser) -> None:
    """How much `tests/engines/fuzz` tries, and what `tests/engines/compatibility` is from."""
    group = parser.getgroup("conserve")
    group.addoption("--fuzz-cases", type=int, default=300, help="requests to try (%(default)s)")
    group.addoption("--fuzz-seed", type=int, default=0, help="which requests (%(default)s)")
    group.addoption("--vllm", type=Path, help="a checkout of vLLM; none: pip gets its source")
    group.addoption("--openresponses", type=Path, help="a clone of Open Responses; none: clone it")
