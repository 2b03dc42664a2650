"""Doors: that two of an experiment differ in one thing alone, and requests carry what they need."""

import sys
from typing import Any

import pytest
import ray
import uvicorn

from conserve.settings import Settings
from conserve.tenants import KeyRing
from deployments.router.frontdoor import FrontDoor
from experiments import doors, keys, later_turns

pytestmark = pytest.mark.usefixtures("ray_as_before")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, dict[str, Any]]]:
    """What would be served, and how."""
    seen: list[tuple[Any, dict[str, Any]]] = []
    monkeypatch.setattr(ray, "init", lambda **options: None)
    monkeypatch.setattr(uvicorn, "run", lambda app, **options: seen.append((app, options)))
    return seen


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What would be compared."""
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(doors, "compare", lambda *arguments: seen.append(arguments))
    return seen


def _run(monkeypatch: pytest.MonkeyPatch, module: Any, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["experiment", *arguments])
    module.main()


def test_doors_differ_in_their_keys_alone(
    served: list[tuple[Any, dict[str, Any]]],
    compared: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _run(monkeypatch, keys)
    ((module, both, folder, _),) = compared
    assert module == keys.__name__
    for door in both:
        _run(monkeypatch, keys, "--door", "1", *door.arguments)
    (off, how), (on, same) = served
    assert how == same
    assert isinstance(off, FrontDoor)
    assert isinstance(on, FrontDoor)
    assert off._settings.keys_file is None
    assert on._settings.model_copy(update={"keys_file": None}) == off._settings
    key = both[1].headers["Authorization"].removeprefix("Bearer ")
    caller = KeyRing(folder / "keys.json", 0.0).find(key, 0.0)
    assert caller is not None
    # All are set, so that all are looked at.
    assert None not in [getattr(caller.limits, name) for name in caller.limits.__struct_fields__]


def test_doors_differ_in_their_memory_alone(
    served: list[tuple[Any, dict[str, Any]]],
    compared: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[tuple[Settings, Any]] = []

    def make(settings: Settings, table: Any, router_id: str, *, homes: Any) -> None:
        made.append((settings, homes))

    monkeypatch.setattr(later_turns, "FrontDoor", make)
    _run(monkeypatch, later_turns)
    ((_, both, _, _),) = compared
    for door in both:
        _run(monkeypatch, later_turns, "--door", "1", *door.arguments)
    (settings, forgets), (same, remembers) = made
    assert settings == same
    assert served[0] == served[1]
    assert (forgets._most, remembers._most > 100) == (0, True)


def test_the_table_is_found_among_the_actors(monkeypatch: pytest.MonkeyPatch) -> None:
    actors = [
        {"name": "conserve:default:table:0a1b", "namespace": "serve"},
        {"name": "conserve:default:table:other", "namespace": "elsewhere"},
        {"name": "SERVE_CONTROLLER_ACTOR", "namespace": "serve"},
    ]
    monkeypatch.setattr(ray.util, "list_named_actors", lambda all_namespaces: actors)
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: (name, namespace))
    table = doors.RunningTable("", Settings())
    assert table._connect() == ("conserve:default:table:0a1b", "serve")
