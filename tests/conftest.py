"""Fixtures of all tests."""

import pytest

# So that an assertion in what tests share says as much when it fails as one in a test.
pytest.register_assert_rewrite("tests.engines", "tests.nvml", "tests.unit")


@pytest.fixture
def anyio_backend() -> str:
    """Asynchronous tests run on asyncio."""
    return "asyncio"
