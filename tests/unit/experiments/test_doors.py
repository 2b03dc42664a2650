"""Doors: the two routers of an experiment differ in one thing alone."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import uvicorn

from conserve.settings import Settings
from deployments.router.frontdoor import FrontDoor
from experiments import appends, doors

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


def test_doors_differ_in_where_appends_are_prefilled(
    served: list[tuple[Any, dict[str, Any]]],
    opened: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def measure(experiment: Any, urls: dict[str, str]) -> dict[str, Any]:
        assert list(urls) == [appends.HOME, appends.WHEREVER]
        return {}

    monkeypatch.setattr(appends, "measure", measure)
    monkeypatch.setattr(appends, "report", lambda results, experiment: None)
    appends.main([])
    ((experiment, both, *_),) = opened
    assert experiment.module == appends.__name__
    for door in both:
        appends.main(["--door", "1", *door.arguments])
    (home, how), (wherever, same) = served
    assert how == same
    assert isinstance(home, FrontDoor)
    assert isinstance(wherever, FrontDoor)
    assert not home._settings.pausing
    assert wherever._settings == home._settings.model_copy(update={"pausing": True})


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
