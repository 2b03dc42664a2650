"""`X-Request-Id` on answers and in engines' requests; what costs much to refuse comes later."""

import asyncio
import re
import time
from typing import Any

import httpx
import pytest

from conserve.errors import ApiError
from deployments.router import errors
from deployments.table_client import TableUnavailable
from tests.unit.deployments.asgi import ask
from tests.unit.deployments.router.fakes import FakeEngines, FakeTable, a_door, exchange
from tests.unit.deployments.stub_table import StubTable

OURS = re.compile(r"[0-9a-f]{32}")


def asked(method: str, path: str, headers: dict[str, Any] | None = None) -> httpx.Response:
    restarted = TableUnavailable("it is silent")
    table = StubTable(conversations=KeyError("a bug"), engines=restarted, observe=None)
    content = b"{" if method == "POST" else None
    return ask(a_door(table), method, path, content=content, headers=headers)


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
    engines = FakeEngines()
    exchange((FakeTable(), engines), headers={} if given is None else {"x-request-id": given})
    (told, _) = engines.got[-1]
    assert OURS.fullmatch(told["x-request-id"]) if given is None else told["x-request-id"] == given


# --- Refusals that took long ---------------------------------------------------------------------


def test_a_cheap_refusal_comes_at_once_and_a_dear_one_later() -> None:
    assert errors.wait_s(0.0) == errors.wait_s(0.025) == 0.0
    assert errors.wait_s(0.125) == pytest.approx(0.4)
    assert errors.wait_s(100.0) == 4.0


@pytest.mark.parametrize(
    ("status", "code", "waits"),
    [
        (400, None, True),
        (422, None, True),
        (429, None, False),
        (503, None, False),
        (404, "model_not_found", False),
        (404, "previous_response_not_found", True),
    ],
)
def test_only_who_is_at_fault_waits(
    monkeypatch: pytest.MonkeyPatch, status: int, code: str | None, waits: bool
) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(errors.asyncio, "sleep", sleep)
    asyncio.run(errors.hold_back(ApiError(status, "no", code), time.perf_counter() - 10.0))
    assert slept == ([4.0] if waits else [])
