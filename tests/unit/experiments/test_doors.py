"""Doors: that two of an experiment differ in one thing alone, and requests carry what they need."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import uvicorn

from conserve.settings import Settings
from conserve.tenants import KeyRing
from deployments.router.frontdoor import FrontDoor
from experiments import doors, keys, later_turns, warm

pytestmark = pytest.mark.usefixtures("ray_as_before")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, dict[str, Any]]]:
    """What would be served, and how."""
    seen: list[tuple[Any, dict[str, Any]]] = []
    monkeypatch.setattr(ray, "init", lambda **options: None)
    monkeypatch.setattr(uvicorn, "run", lambda app, **options: seen.append((app, options)))
    return seen


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Experiments and their doors that would be opened."""
    seen: list[tuple[Any, ...]] = []

    @contextlib.contextmanager
    def record(*arguments: Any) -> Iterator[dict[str, str]]:
        seen.append(arguments)
        yield {door.name: f"http://{door.name}" for door in arguments[1]}

    monkeypatch.setattr(doors, "opened", record)
    return seen


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[list[warm.System]]:
    """What would be compared."""
    seen: list[list[warm.System]] = []
    monkeypatch.setattr(warm, "compare", lambda experiment, systems: seen.append(systems))
    return seen


def test_doors_differ_in_their_keys_alone(
    served: list[tuple[Any, dict[str, Any]]],
    opened: list[tuple[Any, ...]],
    compared: list[list[warm.System]],
) -> None:
    keys.main([])
    ((experiment, both),) = opened
    assert experiment.module == keys.__name__
    for door in both:
        keys.main(["--door", "1", *door.arguments])
    (off, how), (on, same) = served
    assert how == same
    assert isinstance(off, FrontDoor)
    assert isinstance(on, FrontDoor)
    assert off._settings.keys_file is None
    assert on._settings.model_copy(update={"keys_file": None}) == off._settings
    ((bare, with_keys),) = compared
    assert bare == warm.System("no keys", "http://no keys")
    key = with_keys.headers["Authorization"].removeprefix("Bearer ")
    caller = KeyRing(experiment.logs / "keys.json", 0.0).find(key, 0.0)
    assert caller is not None
    # All are set, so that all are looked at.
    assert None not in [getattr(caller.limits, name) for name in caller.limits.__struct_fields__]


def test_doors_differ_in_their_memory_alone(
    served: list[tuple[Any, dict[str, Any]]],
    opened: list[tuple[Any, ...]],
    compared: list[list[warm.System]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[tuple[Settings, Any]] = []

    def make(settings: Settings, table: Any, router_id: str, *, homes: Any) -> None:
        made.append((settings, homes))

    monkeypatch.setattr(later_turns, "FrontDoor", make)
    later_turns.main([])
    ((_, both),) = opened
    assert [one.name for one in compared[0]] == [door.name for door in both]
    for door in both:
        later_turns.main(["--door", "1", *door.arguments])
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
    table = doors.RunningTable("", "", Settings())
    assert table._connect() == ("conserve:default:table:0a1b", "serve")
