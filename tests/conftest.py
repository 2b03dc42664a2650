"""Fixtures: the running application, started once for all tests that use it."""

import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from tests import harness

_ORDER = ("unit", "hetero", "integration", "faults", "small", "wide", "scaling", "cluster")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Quick tests first; then those of one application after the other, marked as such."""

    def rank(item: pytest.Item) -> int:
        folder = Path(str(item.fspath)).parent.name
        return _ORDER.index(folder) if folder in _ORDER else len(_ORDER)

    items.sort(key=rank)
    for item in items:
        if rank(item) > 0:
            item.add_marker("engines")


@pytest.fixture(scope="session")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[harness.Stage]:
    """Whatever runs, it is stopped at the end, and nothing is left."""
    stage = harness.Stage(tmp_path_factory.mktemp("logs"))
    yield stage
    stage.clear()


@pytest.fixture
def main_app(stage: harness.Stage) -> Iterator[str]:
    """One prefiller, two decoders, and a lone engine to compare with; no conversation lives."""
    url = stage.use("main")
    harness.release_all()
    yield url
    harness.release_all()
    assert harness.metric("conserve_decoder_held_tokens") == 0
    assert harness.metric("conserve_prefiller_queued_tokens") == 0
    assert harness.metric("conserve_conversations") == 0


@pytest.fixture
def small_app(stage: harness.Stage) -> Iterator[str]:
    """One prefiller and one decoder with room for 3,072 tokens, a queue of 2."""
    url = stage.use("small")
    harness.release_all()
    yield url
    harness.release_all()
    assert harness.metric("conserve_decoder_held_tokens") == 0


@pytest.fixture
def wide_app(stage: harness.Stage) -> Iterator[str]:
    """Two routers, two prefillers and one decoder; turn 1 is prefilled remotely from 200 tokens."""
    url = stage.use("wide")
    harness.release_all()
    yield url
    harness.release_all()
    assert harness.metric("conserve_decoder_held_tokens") == 0


@pytest.fixture
def scaling_app(stage: harness.Stage) -> Iterator[str]:
    """One prefiller; one decoder, with room for 3,072 tokens, which may become three."""
    url = stage.use("scaling")
    harness.release_all()
    yield url
    harness.release_all()


@pytest.fixture
def bursts_app(stage: harness.Stage) -> Iterator[str]:
    """One decoder; one prefiller, which may become two."""
    url = stage.use("bursts")
    harness.release_all()
    yield url
    harness.release_all()


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Randomness of a test's own, the same in every run."""
    return random.Random(request.node.nodeid)


@pytest.fixture
def anyio_backend() -> str:
    """Asynchronous tests run on asyncio."""
    return "asyncio"


@pytest.fixture
async def client(anyio_backend: str) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client."""
    async with harness.new_client() as client:
        yield client
