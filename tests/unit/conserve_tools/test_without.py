"""The core where this add-on is not installed."""

import sys

import pytest
from starlette.routing import Match

from conserve.settings import Settings, SettingsError, load
from conserve_cli.doctor.node import check_addons
from conserve_tools.routes import EnvironmentPaths
from deployments.router import addons
from deployments.router.addons import Absent, RouterPart
from deployments.start_checks import require_startable
from tests.unit.conserve_tools.test_routes import all_are_refused

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


async def test_its_paths_say_which_addon_has_them() -> None:
    await all_are_refused(addons.parts("application", "1", Settings()), MISSING)


@pytest.mark.parametrize("part", [EnvironmentPaths(None), Absent()])
@pytest.mark.parametrize(("method", "path"), [("DELETE", ""), ("DELETE", "/a/b"), ("POST", "/7/x")])
def test_other_paths_stay_the_cores(part: RouterPart, method: str, path: str) -> None:
    """An id may hold slashes, and ``environments``."""
    scope = {"type": "http", "method": method, "path": f"/v1/conversations/a/environments{path}"}
    assert not any(route.matches(scope)[0] is Match.FULL for route in part.routes())
