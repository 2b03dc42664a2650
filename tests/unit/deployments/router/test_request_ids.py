"""`X-Request-Id`: on every answer and error of every API, and in what engines are told."""

import re
from typing import Any

import httpx
import pytest

from conserve.settings import Settings
from deployments.router.frontdoor import FrontDoor
from deployments.table_client import TableUnavailable
from tests.unit.deployments.asgi import ask
from tests.unit.deployments.router.test_turn import Engines, Table, exchange
from tests.unit.deployments.stub_table import StubTable

OURS = re.compile(r"[0-9a-f]{32}")


class Silent(StubTable):
    """A table that is being started again."""

    async def call(self, method: str, *given: Any) -> Any:
        if method == "conversations":
            raise KeyError("a bug")
        raise TableUnavailable("it is silent")

    def tell(self, method: str, *given: Any) -> None:
        assert method == "observe"


def asked(method: str, path: str, headers: dict[str, Any] | None = None) -> httpx.Response:
    door = FrontDoor(Settings(), Silent(), "router")
    content = b"{" if method == "POST" else None
    return ask(door, method, path, content=content, headers=headers)


JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/live", {}, 200),
        ("GET", "/v1/models", {}, 200),
        ("GET", "/nowhere", {}, 404),
        ("PUT", "/v1/models", {}, 405),
        ("GET", "/v1/models/", {}, 200),
        ("GET", "/v1/models", {"host": "somewhere.example"}, 421),
        ("POST", "/v1/chat/completions", {}, 415),
        ("POST", "/v1/chat/completions", JSON, 400),
        ("POST", "/v1/messages", JSON, 400),
        ("POST", "/v1/responses", JSON, 400),
        ("GET", "/v1/responses/resp_1", {}, 503),
        ("GET", "/v1/conversations", {}, 500),
        (
            "OPTIONS",
            "/v1/messages",
            {"origin": "http://localhost:1", "access-control-request-method": "POST"},
            204,
        ),
    ],
)
def test_every_answer_has_it(method: str, path: str, headers: dict[str, str], status: int) -> None:
    answer = asked(method, path, {**headers, "x-request-id": "mine"})
    assert (answer.status_code, answer.headers.get_list("x-request-id")) == (status, ["mine"])
    answer = asked(method, path, headers)
    (ours,) = answer.headers.get_list("x-request-id")
    assert OURS.fullmatch(ours)


@pytest.mark.parametrize("given", ["é", "x" * 129, "", "a\tb", "\N{GREEK SMALL LETTER ALPHA}"])
def test_one_that_cannot_be_shown_is_replaced(given: str) -> None:
    answer = asked("GET", "/live", {"x-request-id": given.encode()})
    assert OURS.fullmatch(answer.headers["x-request-id"])


@pytest.mark.parametrize("given", ["x" * 128, "req 1/2 {a}~"])
def test_any_other_one_is_kept(given: str) -> None:
    assert asked("GET", "/live", {"x-request-id": given}).headers["x-request-id"] == given


def test_anthropics_api_has_its_own_header_and_says_it_in_errors() -> None:
    answer = asked("POST", "/v1/messages", {**JSON, "x-request-id": "mine"})
    assert answer.headers["request-id"] == "mine"
    assert answer.json()["request_id"] == "mine"
    assert "request-id" not in asked("POST", "/v1/responses", JSON).headers


@pytest.mark.parametrize("given", ["mine", None])
def test_engines_are_told_it(given: str | None) -> None:
    engines = Engines(die=set())
    headers = {} if given is None else {"x-request-id": given}
    exchange(Table(), engines, {"messages": [{"role": "user", "content": "a"}]}, headers=headers)
    (told, _) = engines.got[-1]
    assert OURS.fullmatch(told["x-request-id"]) if given is None else told["x-request-id"] == given
