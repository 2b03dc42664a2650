"""The core where this add-on is not installed."""

import sys
from typing import Any

import httpx
import pytest

from conserve.settings import Settings, SettingsError, load
from conserve_cli.doctor.node import check_addons
from deployments.router import addons
from deployments.router.frontdoor import FrontDoor
from deployments.start_checks import require_startable

MISSING = "is of the add-on conserve_tools, which is not installed here"


@pytest.fixture(autouse=True)
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "conserve_tools.addon", None)


@pytest.mark.parametrize(
    ("setting", "value"), [("enabled", True), ("most", 3), ("limits.wall_s", 5)]
)
def test_its_settings_are_refused_in_one_line(setting: str, value: Any) -> None:
    with pytest.raises(SettingsError) as error:
        load({f"environments.{setting}": value})
    (line,) = error.value.problems
    assert line.startswith(f"environments.{setting.partition('.')[0]} {MISSING}")


def test_an_application_that_asks_for_nothing_of_it_starts() -> None:
    settings = load({"environments.enabled": False})
    require_startable(settings)
    assert [*check_addons(settings)] == []


async def test_its_paths_say_which_addon_has_them() -> None:
    door = FrontDoor(Settings(), None, "r", addons.parts("a", "1", Settings()))  # type: ignore[arg-type]
    transport = httpx.ASGITransport(door)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
        of = "/v1/conversations/a%2Fb/environments"
        for method, path in (
            ("POST", ""), ("GET", ""), ("GET", "/main"), ("DELETE", "/main"), ("POST", "/main/run"),
        ):  # fmt: skip
            body = {"json": {}} if method == "POST" else {}
            answer = await client.request(method, of + path, **body)  # type: ignore[arg-type]
            assert answer.status_code == 404
            error = answer.json()["error"]
            assert error["code"] == "environments_disabled"
            assert MISSING in error["message"]
        assert (await client.get("/live")).status_code == 200
