"""What the HTTP interface does without an engine: requests that never get to one."""

import asyncio
import json
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from conserve.settings import Settings
from deployments.router import reading
from tests.unit.deployments import asgi
from tests.unit.deployments.router.fakes import a_door
from tests.unit.deployments.stub_table import StubTable

LEFT = {"type": "http.disconnect"}


def part(body: bytes) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": True}


def sent_by(app: Any, received: list[dict[str, Any]], **scope: Any) -> list[dict[str, Any]]:
    """Return what is sent back when these messages arrive, and then nothing more."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return received.pop(0) if received else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(app(asgi.scope_of(**scope), receive, send))
    return sent


def post(table: StubTable, received: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Send a chat in these messages."""
    endpoint = asgi.turn_endpoint(Settings(), table, None, "router")
    return sent_by(endpoint, received, path="/v1/chat/completions")


def release_program(received: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Send a release whose body comes in these messages."""
    headers = {"content-type": "application/json"}
    return sent_by(a_door(), received, method="POST", path="/programs/release", headers=headers)


def ask(method: str, path: str) -> httpx.Response:
    """Return the answer to a request without a body, whose path is sent as it is."""
    url, headers = f"http://localhost:8000{path}", {"content-type": "application/json"}
    return asgi.ask(a_door(StubTable(observe=None)), method, url, headers=headers)


def test_a_request_left_half_sent_is_refused_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_TIMEOUT_S", 0.05)
    table = StubTable(observe=None)
    start, body = post(table, [part(b'{"messages": [')])
    assert start["status"] == 408
    error = json.loads(body["body"])["error"]
    assert error["code"] == "timeout"
    assert "not whole" in error["message"]
    assert [method for method, *_ in table.told] == ["observe"]


def test_nothing_is_sent_to_a_client_that_left_while_it_sent() -> None:
    assert post(StubTable(), [part(b'{"messages": ['), LEFT]) == []


def test_a_body_that_grows_over_the_limit_is_refused_before_its_end() -> None:
    """It may come without a Content-Length."""
    start, _ = post(StubTable(observe=None), [part(b" " * (8 << 20)) for _ in range(40)])
    assert start["status"] == 413


@pytest.mark.parametrize("limit", ["²", "0", "-1", "10001", "9" * 5000, "1e3", ""])
def test_a_limit_that_is_no_number_is_refused(limit: str) -> None:
    """Some of these are digits to Python, and no number."""
    answer = ask("GET", f"/v1/conversations?limit={quote(limit)}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "limit")


def test_a_release_left_half_sent_is_refused_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_SHORT_TIMEOUT_S", 0.05)
    start, body = release_program([part(b"{")])
    assert start["status"] == 408
    assert json.loads(body["body"])["error"]["code"] == "timeout"


def test_a_client_that_leaves_while_it_sends_is_no_failure_of_ours() -> None:
    start, _ = release_program([part(b"{"), LEFT])
    assert start["status"] < 500


@pytest.mark.parametrize(
    ("method", "path", "status", "said"),
    [
        ("GET", "/live/", 200, "ok"),
        ("GET", "//v1///conversations//?limit=x", 400, "limit must be"),
        ("GET", "/v1/models//a%2F%2Fb%2F", 404, "the model 'a//b/' is not"),
        ("POST", "/v1/chat/completions/", 400, "not valid JSON"),
        ("POST", "//v1//messages/", 400, '"type":"invalid_request_error","message":"the body'),
        ("POST", "/v1/responses/input_tokens/", 400, "not valid JSON"),
        ("GET", "/%2Fv1/models", 404, "no such path"),
        ("GET", "/v1/models%2F", 404, "no such path"),
        ("GET", "/nowhere/" + "a/" * 20_000, 404, "no such path: /nowhere/a/a"),
        # What a base URL or a proxy has got wrong is named, in the shape of the API that is meant.
        ("POST", "/chat/completions", 404, "; use /v1/chat/completions. Correct the base URL"),
        ("POST", "/v1/v1/messages", 404, 'error","message":"no such path: /v1/v1/messages; use /v'),
        ("POST", "/v1/v1/messages", 404, '"type":"not_found_error"'),
        ("POST", "/llm/prod/v1/responses/", 404, "; use /v1/responses. "),
        ("GET", "/llm/health", 404, "or have the proxy strip its prefix"),
        ("GET", "/models/a%2Fb", 404, "; use /v1/models/a/b. "),
        ("GET", "/dashboard/nothing", 404, 'no such path: /dashboard/nothing"'),
    ],
)
def test_paths_as_clients_write_them(method: str, path: str, status: int, said: str) -> None:
    answer = ask(method, path)
    assert (answer.status_code, "location" in answer.headers) == (status, False)
    assert said in answer.text


def test_the_dashboards_links_need_its_path_as_it_is() -> None:
    """A redirect that is relative keeps what a proxy puts before the path."""
    answer = ask("GET", "/dashboard/")
    assert (answer.status_code, answer.headers["location"]) == (307, "../dashboard")


@pytest.mark.parametrize(
    ("method", "path", "has"),
    [
        ("DELETE", "/v1/models", "GET, HEAD"),
        ("GET", "/v1/chat/completions", "POST"),
        ("POST", "/v1/responses/resp_1", "DELETE, GET, HEAD"),
        ("POST", "/v1/conversations/a/b", "DELETE, GET, HEAD"),
    ],
)
def test_another_method_is_told_which_there_are(method: str, path: str, has: str) -> None:
    answer = ask(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, has)
    message = answer.json()["error"]["message"]
    assert message == f"{method} is not possible on {path}; it has {has}"


def test_a_server_that_is_stopped_takes_no_new_turns_and_says_when_to_come_back() -> None:
    door = a_door()
    door.refusing = True
    answer = asgi.ask(door, "POST", "/v1/chat/completions", json={})
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) > 0
    assert "being stopped" in answer.json()["error"]["message"]
