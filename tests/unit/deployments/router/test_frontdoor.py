"""What the HTTP interface does without an engine: requests that never get to one."""

import asyncio
import json
from typing import Any
from urllib.parse import quote, unquote

import pytest

from conserve.settings import Settings
from deployments.router import reading
from deployments.router.turn import TurnEndpoint
from tests.unit.deployments.router.fakes import a_door
from tests.unit.deployments.stub_table import StubTable

NOTHING = {"type": "http.request", "body": b""}


def sent_by(app: Any, received: list[dict[str, Any]], **scope: Any) -> list[dict[str, Any]]:
    """Return what is sent back when these messages arrive, and then nothing more."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if not received:
            await asyncio.Event().wait()
        return received.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(app({"type": "http", "query_string": b"", "headers": [], **scope}, receive, send))
    return sent


def post(table: StubTable, received: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Send a chat in these messages."""
    endpoint = TurnEndpoint(Settings(), table, None, "router")  # type: ignore[arg-type]
    return sent_by(endpoint, received, path="/v1/chat/completions")


def answer(method: str, path: str, received: list[dict[str, Any]], **scope: Any) -> Any:
    """Send any other request."""
    door = a_door(StubTable(observe=None))
    paths = {"path": unquote(path), "raw_path": path.encode()}
    return sent_by(door, received, method=method, **paths, **scope)


def test_a_request_left_half_sent_is_refused_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_TIMEOUT_S", 0.05)
    table = StubTable(observe=None)
    half = {"type": "http.request", "body": b'{"messages": [', "more_body": True}
    start, body = post(table, [half])
    assert start["status"] == 408
    error = json.loads(body["body"])["error"]
    assert error["code"] == "timeout"
    assert "not whole" in error["message"]
    assert [method for method, _ in table.told] == ["observe"]


def test_nothing_is_sent_to_a_client_that_left_while_it_sent() -> None:
    table = StubTable(observe=None)
    half = {"type": "http.request", "body": b'{"messages": [', "more_body": True}
    assert post(table, [half, {"type": "http.disconnect"}]) == []
    assert table.told == []


def test_a_body_that_grows_over_the_limit_is_refused_before_its_end() -> None:
    """It may come without a Content-Length."""
    table = StubTable(observe=None)
    part = {"type": "http.request", "body": b" " * (8 << 20), "more_body": True}
    start, _ = post(table, [dict(part) for _ in range(40)])
    assert start["status"] == 413


@pytest.mark.parametrize("limit", ["²", "0", "-1", "10001", "9" * 5000, "1e3", ""])
def test_a_limit_that_is_no_number_is_refused(limit: str) -> None:
    """Some of these are digits to Python, and no number."""
    query = f"limit={quote(limit)}".encode()
    start, body = answer("GET", "/v1/conversations", [NOTHING], query_string=query)
    assert start["status"] == 400
    assert json.loads(body["body"])["error"]["param"] == "limit"


def release_program(received: list[dict[str, Any]]) -> Any:
    """Send a release whose body comes in these messages, and then no more."""
    headers = [(b"content-type", b"application/json")]
    return answer("POST", "/programs/release", received, headers=headers)


def test_a_release_left_half_sent_is_refused_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_SHORT_TIMEOUT_S", 0.05)
    start, body = release_program([{"type": "http.request", "body": b"{", "more_body": True}])
    assert start["status"] == 408
    assert json.loads(body["body"])["error"]["code"] == "timeout"


def test_a_client_that_leaves_while_it_sends_is_no_failure_of_ours() -> None:
    half = {"type": "http.request", "body": b"{", "more_body": True}
    start, _ = release_program([half, {"type": "http.disconnect"}])
    assert start["status"] < 500


def ask(method: str, path: str, query: str = "") -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and body of the answer to a request without a body."""
    headers = [(b"host", b"localhost:8000"), (b"content-type", b"application/json")]
    address = {"query_string": query.encode(), "scheme": "http", "server": ("127.0.0.1", 8000)}
    start, body = answer(method, path, [NOTHING], headers=headers, **address)
    return start["status"], dict(_text(start["headers"])), body["body"]


def _text(headers: list[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    return [(name.decode(), value.decode()) for name, value in headers]


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
    path, _, query = path.partition("?")
    found, headers, body = ask(method, path, query)
    assert (found, "location" in headers) == (status, False)
    assert said in body.decode()


def test_the_dashboards_links_need_its_path_as_it_is() -> None:
    """A redirect that is relative keeps what a proxy puts before the path."""
    status, headers, _ = ask("GET", "/dashboard/")
    assert (status, headers["location"]) == (307, "../dashboard")


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
    status, headers, body = ask(method, path)
    assert (status, headers["allow"]) == (405, has)
    message = json.loads(body)["error"]["message"]
    assert message == f"{method} is not possible on {path}; it has {has}"


def test_a_server_that_is_stopped_takes_no_new_turns_and_says_when_to_come_back() -> None:
    door = a_door()
    door.refusing = True
    scope = {"method": "POST", "path": "/v1/chat/completions", "client": ("127.0.0.1", 1)}
    headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
    start, body = sent_by(door, [NOTHING], **scope, headers=headers)
    assert start["status"] == 503
    assert int(dict(start["headers"])[b"retry-after"]) > 0
    assert "being stopped" in json.loads(body["body"])["error"]["message"]
