"""Tests of a patch start with the other project's own code; the fixture `patched` applies it.

``test_NAME.py`` has the tests of the patch ``NAME``.
"""

import importlib
from types import ModuleType

import pytest

from deployments.upstream.patch import Patch
from deployments.upstream.patches import FILES
from tests.unit.deployments.upstream import originals

_own: dict[ModuleType, list[originals.Own]] = {}


def _patch_of(tests: ModuleType) -> Patch | None:
    name = tests.__name__.rpartition(".test_")[2]
    if name not in FILES:
        return None
    patch: Patch = importlib.import_module(f"deployments.upstream.{name}").PATCH
    return patch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Note what each patch changes, before any test has run."""
    for item in items:
        if isinstance(item, pytest.Function) and item.module not in _own:
            patch = _patch_of(item.module)
            _own[item.module] = [] if patch is None else originals.members(patch)


@pytest.fixture(autouse=True)
def unpatched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    originals.put_back(monkeypatch, _own[request.module])


@pytest.fixture
def patched(request: pytest.FixtureRequest, unpatched: None) -> None:
    patch = _patch_of(request.module)
    assert patch is not None
    originals.apply(patch)
