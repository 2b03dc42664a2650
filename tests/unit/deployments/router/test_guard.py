"""Which requests a router hears: what a web page could send is none of them."""

import asyncio
import json
from typing import Any

import pytest

from conserve.settings import Settings
from deployments.router.frontdoor import FrontDoor
from deployments.router.guard import Guard

JSON = {"content-type": "application/json"}


def ask(
    headers: dict[str, str] | list[tuple[str, str]],
    method: str = "POST",
    host: str = "127.0.0.1",
    allowed: tuple[str, ...] = (),
) -> tuple[int, str | None]:
    """Status and error code; 204 is what is behind the guard."""
    given = headers.items() if isinstance(headers, dict) else headers
    scope = {
        "type": "http",
        "method": method,
        "path": "/v1/conversations/x",
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in given],
    }
    sent: list[Any] = []

    async def behind(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(Guard(behind, host, allowed)(scope, None, send))  # type: ignore[arg-type]
    if len(sent) == 1:
        return sent[0]["status"], None
    error = json.loads(sent[1]["body"])["error"]
    assert len(error["message"]) < 400
    return sent[0]["status"], error["code"]


@pytest.mark.parametrize(
    "kind",
    ["application/json", "Application/JSON; charset=utf-8", "application/vnd.a+json ;x=1"],
)
def test_json_is_heard(kind: str) -> None:
    assert ask({"host": "localhost", "content-type": kind}) == (204, None)


@pytest.mark.parametrize(
    "kind",
    [
        None,
        "",
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; x=application/json",
        "text/plain; application/json",
        "application/jsonp",
        "text/x+json",
        "application/ json",
    ],
)
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_what_does_not_say_that_it_is_json_is_refused(kind: str | None, host: str) -> None:
    headers = {"host": "localhost"} | ({} if kind is None else {"content-type": kind})
    assert ask(headers, host=host) == (415, "unsupported_media_type")
    # There is no body to speak of.
    assert ask(headers, method="GET", host=host) == (204, None)
    assert ask(headers, method="DELETE", host=host) == (204, None)


@pytest.mark.parametrize(
    "name", ["localhost", "LOCALHOST", "localhost.", "127.0.0.1", "127.1.2.3", "[::1]"]
)
@pytest.mark.parametrize("port", ["", ":8000"])
@pytest.mark.parametrize("listens", ["127.0.0.1", "::1", "localhost"])
def test_loopback_by_any_of_its_names(name: str, port: str, listens: str) -> None:
    assert ask({"host": name + port, **JSON}, host=listens) == (204, None)
    origin = f"https://{name}{port}"
    assert ask({"host": name, "origin": origin, **JSON}, host=listens) == (204, None)


@pytest.mark.parametrize(
    "name",
    [
        "rebound.example",
        "rebound.example:8000",
        "localhost.rebound.example",
        "127.0.0.1.rebound.example",
        "10.0.0.1",
        "0.0.0.0",
        "localhost@rebound.example",
        "rebound.example/localhost",
        "[::2]",
        "[",
        "",
        "é",
    ],
)
@pytest.mark.parametrize("method", ["POST", "GET", "DELETE"])
def test_no_other_name_is_heard_on_loopback(name: str, method: str) -> None:
    assert ask({"host": name, **JSON}, method) == (421, "wrong_host")
    assert ask({"host": "localhost", "origin": f"http://{name}", **JSON}, method) == (
        403,
        "wrong_origin",
    )
    # Where others are meant to come, they come by whatever name there is.
    assert ask({"host": name, "origin": f"http://{name}", **JSON}, method, "0.0.0.0") == (204, None)


def test_a_page_of_no_origin_is_refused() -> None:
    """A file, or a frame in a sandbox."""
    assert ask({"host": "localhost", "origin": "null", **JSON}) == (403, "wrong_origin")


def test_every_host_counts_and_none_need_be() -> None:
    both = [("host", "localhost"), ("host", "rebound.example"), *JSON.items()]
    assert ask(both) == (421, "wrong_host")
    # HTTP/1.0, which no browser speaks.
    assert ask(JSON) == (204, None)


def test_names_that_the_operator_allows() -> None:
    headers = {"host": "llm.example:80", "origin": "https://llm.example", **JSON}
    assert ask(headers) == (421, "wrong_host")
    assert ask(headers, allowed=("LLM.example",)) == (204, None)


def test_it_stands_before_every_path() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    door = FrontDoor(Settings(), None, "router")  # type: ignore[arg-type]
    for method, path in (("POST", "/programs/release"), ("GET", "/metrics")):
        headers = [(b"host", b"rebound.example"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": method, "path": path, "headers": headers}
        asyncio.run(door(scope, None, send))  # type: ignore[arg-type]
    assert [one["status"] for one in sent if "status" in one] == [421, 421]


@pytest.mark.parametrize(
    "path", ["/metrics\n", "/v1/chat/completions\n", "/v1/engines\r", "/\u2028"]
)
def test_a_path_with_what_cannot_be_seen_is_none(path: str) -> None:
    """Routes match with a line break at the end, and what compares paths does not."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    door = FrontDoor(Settings(), None, "router")  # type: ignore[arg-type]
    headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "GET", "path": path, "headers": headers}
    asyncio.run(door(scope, None, send))  # type: ignore[arg-type]
    assert sent[0]["status"] == 404
