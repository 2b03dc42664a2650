"""What keys cost: that the two routers differ in their keys alone, and requests carry them."""

from pathlib import Path
from typing import Any

import pytest
import ray
import uvicorn

from benchmarks.experiments import keys
from conserve.tenants import KeyRing
from deployments.router.frontdoor import FrontDoor

pytestmark = pytest.mark.usefixtures("ray_as_before")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, dict[str, Any]]]:
    """What would be served, and how."""
    seen: list[tuple[Any, dict[str, Any]]] = []
    monkeypatch.setattr(ray, "init", lambda **options: None)
    monkeypatch.setattr(uvicorn, "run", lambda app, **options: seen.append((app, options)))
    return seen


def test_doors_differ_in_their_keys_alone(
    served: list[tuple[Any, dict[str, Any]]], tmp_path: Path
) -> None:
    path = tmp_path / "keys.json"
    key = keys.make_keys(path)
    keys.door(1, None)
    keys.door(1, path)
    (off, how), (on, same) = served
    assert how == same
    assert isinstance(off, FrontDoor)
    assert isinstance(on, FrontDoor)
    assert off._settings.keys_file is None
    assert on._settings.model_copy(update={"keys_file": None}) == off._settings
    caller = KeyRing(path, 0.0).find(key, 0.0)
    assert caller is not None
    # All are set, so that all are looked at.
    assert None not in [getattr(caller.limits, name) for name in caller.limits.__struct_fields__]


def test_the_table_is_found_among_the_actors(monkeypatch: pytest.MonkeyPatch) -> None:
    actors = [
        {"name": "conserve:default:table:0a1b", "namespace": "serve"},
        {"name": "conserve:default:table:other", "namespace": "elsewhere"},
        {"name": "SERVE_CONTROLLER_ACTOR", "namespace": "serve"},
    ]
    monkeypatch.setattr(ray.util, "list_named_actors", lambda all_namespaces: actors)
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: (name, namespace))
    table = keys._RunningTable("", keys.Settings())
    assert table._connect() == ("conserve:default:table:0a1b", "serve")
