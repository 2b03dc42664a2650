"""Which requests a router hears: what a web page could send is none of them."""

import json
from typing import Any

import pytest

from deployments.router.guard import Guard
from tests.unit.deployments.asgi import exchange
from tests.unit.deployments.router.fakes import a_door

JSON = {"content-type": "application/json"}


Given = dict[str, str] | list[tuple[str, str]]


def ask(headers: Given, method: str = "POST", *guarded: Any, **more: Any) -> tuple[int, str | None]:
    """Status and error code; 204 is what is behind the guard."""
    sent = answer(headers, method, *guarded, **more)
    if len(sent) == 1:
        return sent[0]["status"], None
    error = json.loads(sent[1]["body"])["error"]
    assert len(error["message"]) < 400
    return sent[0]["status"], error["code"]


def answer(
    headers: Given,
    method: str = "POST",
    host: str = "127.0.0.1",
    allowed: tuple[str, ...] = (),
    keyed: bool = False,
) -> list[Any]:
    """What the guard sends, or lets through from an application that answers 204."""

    async def behind(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": [(b"x-own", b"1")]})

    guard = Guard(behind, host, allowed, keyed)
    return exchange(guard, method=method, path="/v1/conversations/x", headers=headers)


def cors(sent: list[Any]) -> dict[str, str]:
    """The CORS headers of an answer, and `Vary`, without `access-control-`."""
    found = {name.lower().decode(): value.decode() for name, value in sent[0]["headers"]}
    return {
        name.removeprefix("access-control-"): value
        for name, value in found.items()
        if name.startswith("access-control-") or name == "vary"
    }


@pytest.mark.parametrize(
    "kind", ["application/json", "Application/JSON; charset=utf-8", "application/vnd.a+json ;x=1"]
)
def test_json_is_heard(kind: str) -> None:
    assert ask({"host": "localhost", "content-type": kind}) == (204, None)


@pytest.mark.parametrize(
    "kind",
    [
        None,
        "multipart/form-data; x=application/json",
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
    "name",
    [
        "localhost",
        "127.1.2.3",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "0.0.0.0",
        "agent.localhost",
    ],
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
        "agent.localhost.rebound.example",
        "127.0.0.1.rebound.example",
        "rebound-localhost",
        "localhost@rebound.example",
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


@pytest.mark.parametrize("address", ["10.0.0.1", "192.168.1.5:8000", "[::2]", "[fe80::1%25lo]"])
def test_an_address_cannot_be_rebound_and_is_no_origin_of_ours(address: str) -> None:
    """A tunnel's client names its own end; a page from there is a page of that server."""
    assert ask({"host": address, **JSON}) == (204, None)
    assert ask({"host": "localhost", "origin": f"http://{address}", **JSON}) == (
        403,
        "wrong_origin",
    )


PREFLIGHT = {
    "host": "localhost:8000",
    "origin": "http://localhost:3000",
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-conversation-id",
}


@pytest.mark.parametrize("origin", ["http://localhost:3000", "https://app.example", "http://[::1]"])
def test_a_preflight_of_an_origin_that_is_admitted(origin: str) -> None:
    """It has no key and no body, and is answered before anything asks for one."""
    sent = answer({**PREFLIGHT, "origin": origin}, "OPTIONS", allowed=("app.example",))
    assert sent[0]["status"] == 204
    assert b"".join(part.get("body", b"") for part in sent[1:]) == b""
    assert cors(sent) == {
        "allow-origin": origin,
        "allow-methods": "GET, POST, DELETE",
        "allow-headers": "authorization,content-type,x-conversation-id",
        "expose-headers": EXPOSED,
        "max-age": "7200",
        "vary": "Origin",
    }
    # It came from the guard, and not from behind it.
    assert b"x-own" not in dict(sent[0]["headers"])


EXPOSED = (
    "X-Conversation-Id, X-Conserve-Decoder, X-Conserve-Unserved-Tools, X-Conserve-Ignored-Fields, "
    "X-Request-Id, Request-Id, Retry-After, X-Should-Retry"
)


def test_a_preflight_of_another_origin_or_name_is_refused() -> None:
    assert ask({**PREFLIGHT, "origin": "https://rebound.example"}, "OPTIONS") == (
        403,
        "wrong_origin",
    )
    assert ask({**PREFLIGHT, "host": "rebound.example"}, "OPTIONS") == (421, "wrong_host")
    for headers in ({**PREFLIGHT, "origin": "https://rebound.example"}, {**PREFLIGHT, "host": "x"}):
        assert cors(answer(headers, "OPTIONS")) == {}


def test_options_that_are_no_preflight_go_on() -> None:
    plain = {"host": "localhost", "origin": "http://localhost:3000"}
    assert b"x-own" in dict(answer(plain, "OPTIONS")[0]["headers"])
    asked = {"host": "localhost", "access-control-request-method": "POST"}
    assert b"x-own" in dict(answer(asked, "OPTIONS")[0]["headers"])


def test_a_page_reads_answers_and_refusals() -> None:
    page = {"host": "localhost", "origin": "http://localhost:3000"}
    readable = {
        "allow-origin": "http://localhost:3000",
        "expose-headers": EXPOSED,
        "vary": "Origin",
    }
    sent = answer({**page, **JSON})
    assert cors(sent) == readable
    assert b"x-own" in dict(sent[0]["headers"])
    refused = answer({**page, "content-type": "text/plain"})
    assert refused[0]["status"] == 415
    assert cors(refused) == readable
    # To whom is no page there is nothing to say.
    assert cors(answer({"host": "localhost", **JSON})) == {}


def test_which_pages_may_read_beyond_loopback() -> None:
    """With keys any: it needs one. Without, those that the operator names."""
    page = {"host": "llm.example", "origin": "https://app.example", **JSON}
    assert cors(answer(page, host="0.0.0.0", keyed=True))["allow-origin"] == "https://app.example"
    heard = answer(page, host="0.0.0.0")
    assert heard[0]["status"] == 204
    assert cors(heard) == {}
    named = answer(page, host="0.0.0.0", allowed=("app.example",))
    assert cors(named)["allow-origin"] == "https://app.example"
    preflight = {**PREFLIGHT, "origin": "https://app.example"}
    assert answer(preflight, "OPTIONS", "0.0.0.0", keyed=True)[0]["status"] == 204
    assert cors(answer(preflight, "OPTIONS", "0.0.0.0")) == {}
    # Loopback's guard is no looser with keys.
    assert answer(page | {"host": "localhost"}, keyed=True)[0]["status"] == 403


def test_an_origin_that_comes_twice_is_none() -> None:
    twice = [("host", "x"), ("origin", "https://a.example"), ("origin", "https://b.example")]
    assert cors(answer([*twice, *JSON.items()], host="0.0.0.0", keyed=True)) == {}


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


@pytest.mark.parametrize(
    ("method", "path", "host", "status"),
    [
        ("POST", "/programs/release", "rebound.example", 421),
        # Routes match with a line break at the end, and what compares paths does not.
        ("GET", "/metrics\n", "127.0.0.1", 404),
        ("GET", "/v1/chat/completions\n", "127.0.0.1", 404),
    ],
)
def test_it_stands_before_every_path(method: str, path: str, host: str, status: int) -> None:
    headers = {"host": host, **JSON}
    assert exchange(a_door(), method=method, path=path, headers=headers)[0]["status"] == status
