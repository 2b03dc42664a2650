"""The core where this add-on is not installed."""

import sys

import pytest
from starlette.routing import Match

from conserve.settings import Settings, SettingsError, load
from conserve_cli.doctor.node import check_addons
from conserve_tools.routes import EnvironmentPaths
from deployments.router import addons
from deployments.start_checks import require_startable

MISSING = "needs the add-on conserve_tools, which is not installed here"


@pytest.fixture(autouse=True)
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "conserve_tools.addon", None)


def test_its_settings_are_refused_in_one_line() -> None:
    with pytest.raises(SettingsError) as error:
        load({"environments.limits.wall_s": 5})
    (line,) = error.value.problems
    assert line.startswith(f"environments.limits {MISSING}")


def test_an_application_that_asks_for_nothing_of_it_starts() -> None:
    settings = load({"environments.enabled": False})
    require_startable(settings)
    assert check_addons(settings) == []


def test_it_has_no_part_of_a_router() -> None:
    assert addons.parts("application", "1", Settings()) == []


@pytest.mark.parametrize(("method", "path"), [("DELETE", ""), ("DELETE", "/a/b"), ("POST", "/7/x")])
def test_other_paths_stay_the_cores(method: str, path: str) -> None:
    """An id may hold slashes, and ``environments``."""
    scope = {"type": "http", "method": method, "path": f"/v1/conversations/a/environments{path}"}
    routes = EnvironmentPaths(None).routes()
    assert not any(route.matches(scope)[0] is Match.FULL for route in routes)
