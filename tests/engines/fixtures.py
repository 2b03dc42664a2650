"""Fixtures of tests on engines: the running application, once for all its tests, or none at all."""

import random
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from tests.engines import order
from tests.engines.client import new_client, release_all
from tests.engines.metrics import metric
from tests.engines.processes import require_none_left
from tests.engines.stage import Stage

# What is 0 when no conversation lives.
_AT_REST = (
    "conserve_decoder_held_tokens",
    "conserve_prefiller_queued_tokens",
    "conserve_conversations",
)


# First, for the marker to be there when pytest selects by it.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests without engines first; then those of one application after the other."""
    order.arrange(items)


@pytest.fixture(scope="session")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Whatever runs, it is stopped at the end, and nothing is left."""
    stage = Stage(tmp_path_factory.mktemp("logs"))
    yield stage
    stage.clear()


@pytest.fixture
def application(request: pytest.FixtureRequest, stage: Stage) -> Iterator[str]:
    """URL of the application that the marker `application` names; no conversation lives on it.

    Nor does one afterwards: what the test leaves is ended, and then nothing counts any more.
    """
    url = stage.use(order.wanted(request.node)[0])
    release_all()
    yield url
    release_all()
    for name in _AT_REST:
        assert metric(name) == 0, name


@pytest.fixture
def machine_alone(stage: Stage) -> Iterator[None]:
    """No application runs beside the test, which starts its own, and leaves no process behind."""
    stage.clear()
    yield
    require_none_left()


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Randomness of a test's own, the same in every run."""
    return random.Random(request.node.nodeid)


@pytest.fixture
async def client(anyio_backend: str) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client."""
    async with new_client() as client:
        yield client
