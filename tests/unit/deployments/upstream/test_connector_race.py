"""Replicas that start at a time, each of which registers Ray's connectors."""

from collections.abc import Callable

import pytest
from ray.llm._internal.serve.engines.vllm.kv_transfer import factory
from ray.llm._internal.serve.utils.registry import ComponentRegistry

from deployments.upstream.connector_race import keep_what_is_registered


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Ray's code at import, while another replica registers between its looks and its calls."""
    monkeypatch.setattr(factory.KVConnectorBackendFactory, "is_registered", lambda name: False)
    load: Callable[[], None] = factory._initialize_registry
    return load


def test_ray_takes_what_another_replica_registered_for_an_error(load: Callable[[], None]) -> None:
    with pytest.raises(ValueError, match="is already registered"):
        load()


def test_a_patched_replica_keeps_what_another_one_registered(load: Callable[[], None]) -> None:
    keep_what_is_registered()
    load()


def test_another_error_stays_one() -> None:
    with pytest.raises(ValueError, match="Invalid format"):
        ComponentRegistry("parts").register("one", "no-module")
