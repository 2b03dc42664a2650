"""The paths of environments without a manager: off, and what is asked of one."""

from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from conserve.errors import ApiError
from conserve.settings import Settings, SettingsError, load
from conserve_tools.routes import EnvironmentClient, EnvironmentPaths
from deployments.router.addons import RouterPart
from deployments.router.frontdoor import FrontDoor
from tests.unit.deployments.stub_table import StubTable

OF = "/v1/conversations/a%2Fb/environments"
PATHS = (
    ("POST", OF), ("GET", OF), ("GET", f"{OF}/main"), ("DELETE", f"{OF}/main"),
    ("POST", f"{OF}/main/run"),
)  # fmt: skip


class Manager(EnvironmentClient):
    """Keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    async def _ask(self, patience: Any, method: Any, *asked: Any, **named: Any) -> Any:
        self.asked.append((method.__name__, *asked))
        if method.__name__ == "shown":
            raise ApiError(404, "no such environment", "environment_not_found")
        return {"id": "main"}

    async def run(self, *asked: Any) -> Any:
        self.asked.append(("run", *asked))
        return {"exit_code": 0}


def client(*parts: RouterPart) -> httpx.AsyncClient:
    door = FrontDoor(Settings(), StubTable(), "router", parts)
    return httpx.AsyncClient(transport=httpx.ASGITransport(door), base_url="http://127.0.0.1:8000")


async def test_they_are_off_unless_a_setting_says_otherwise() -> None:
    assert not Settings().environments.enabled
    await all_are_refused([EnvironmentPaths(None)], "environments.enabled=true")


async def all_are_refused(parts: Sequence[RouterPart], why: str) -> None:
    """See that a router with these parts refuses each path."""
    async with client(*parts) as http:
        for method, path in PATHS:
            body = {"json": {"command": "id"}} if method == "POST" else {}
            answer = await http.request(method, path, **body)  # type: ignore[arg-type]
            assert answer.status_code == 404
            error = answer.json()["error"]
            assert error["code"] == "environments_disabled"
            assert why in error["message"]


async def test_what_is_asked_of_the_manager() -> None:
    manager = Manager()
    async with client(EnvironmentPaths(manager)) as http:
        await http.post(OF, json={"ports": 1})
        assert (await http.get(OF)).json() == {"object": "list", "data": {"id": "main"}}
        assert (await http.get(f"{OF}/main")).status_code == 404
        assert (await http.delete(f"{OF}/main")).json()["deleted"]
        answer = await http.post(f"{OF}/main/run", json={"command": "ls"})
        assert answer.json() == {"exit_code": 0}
    assert manager.asked == [
        ("declare", "a/b", {"ports": 1}),
        ("listed", "a/b"),
        ("shown", "a/b", "main"),
        ("let_go", "a/b", "main"),
        ("run", "a/b", "main", {"command": "ls"}),
    ]


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({"Origin": "https://evil.example"}, b"{}", 403),
        ({"Host": "evil.example"}, b"{}", 421),
        ({"Content-Type": "text/plain"}, b"{}", 415),
        ({}, b"{", 400),
        ({}, b"x" * (2**21 + 1), 413),
    ],
)
async def test_who_is_not_heard(headers: dict[str, str], body: bytes, status: int) -> None:
    manager = Manager()
    async with client(EnvironmentPaths(manager)) as http:
        sent = {"Content-Type": "application/json", **headers}
        assert (await http.post(f"{OF}/main/run", content=body, headers=sent)).status_code == status
    assert manager.asked == []


def test_nobody_without_a_key_runs_commands_from_elsewhere() -> None:
    asked = {"environments.enabled": True, "host": "0.0.0.0", "unauthenticated": True}
    with pytest.raises(SettingsError, match=r"environments\.enabled: whoever reaches"):
        load(asked)
    load({**asked, "host": "127.0.0.1"})
