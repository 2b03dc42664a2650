"""Who may ask a router for what, with keys and without, and whose conversations it is about."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from conserve.pausing import ToolReport
from conserve.settings import Settings, SettingsError, load
from conserve.tenants import KeyFileError
from deployments.answers import Alive, Live
from deployments.messages import TurnTenant
from deployments.router.access import require_keys
from tests.unit.deployments import asgi
from tests.unit.deployments.router.fakes import Keys, a_door, bearer
from tests.unit.deployments.stub_table import StubTable

PATHS = [
    ("GET", "/v1/models"),
    ("GET", "/v1/conversations/x"),
    ("DELETE", "/v1/conversations/x"),
    ("POST", "/v1/engines/d#1/drain"),
    ("GET", "/metrics"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/nowhere"),
    ("POST", "//v1//engines//d%231//drain/"),
    ("GET", "/%2Fhealth"),
]


def a_table(**changes: Any) -> StubTable:
    """Answers what can be asked."""
    answers = {
        "conversations": b'{"object":"list","data":[],"total":0}',
        "conversation": {"id": "x"},
        "cache": Live(),
        "recording": Live(),
        "release": True,
        "report_tool": 1,
        "engines": [],
        "drain": 0,
        "metrics": b"",
        "health": Alive(1, 1),
        "observe": None,
    }
    return StubTable(**answers | changes)


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)


def ask(
    settings: Settings,
    method: str,
    path: str,
    headers: Mapping[str, str] | None = None,
    *,
    peer: str = "10.0.0.9",
    body: bytes = b"",
    table: StubTable | None = None,
) -> tuple[int, dict[str, str], Any]:
    """Status, headers and body of a router's answer."""
    door = a_door(table or a_table(), settings)
    given = {"content-type": "application/json", **(headers or {})}
    url = "http://10.0.0.1:8000" + quote(path, safe="/?=&%")
    answer = asgi.ask(door, method, url, peer=peer, content=body, headers=given)
    raw = answer.content
    return answer.status_code, dict(answer.headers), json.loads(raw) if raw[:1] == b"{" else raw


# --- With keys -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "path"), PATHS)
@pytest.mark.parametrize("how", ["none", "wrong", "basic", "bearer of nothing"])
def test_nothing_is_told_or_done_without_a_good_key(
    keys: Keys, method: str, path: str, how: str
) -> None:
    headers = {
        "none": {},
        "wrong": bearer(keys.acme[:-1] + ("1" if keys.acme[-1] == "0" else "0")),
        "basic": {"Authorization": f"Basic {keys.acme}"},
        "bearer of nothing": {"Authorization": "Bearer "},
    }[how]
    table = a_table()
    status, found, body = ask(keys.settings, method, path, headers, table=table)
    assert status == 401
    assert found["www-authenticate"] == "Bearer"
    assert body["error"]["code"] == "invalid_api_key"
    assert body["error"]["type"] == "authentication_error"
    assert table.asked == []
    assert keys.acme[17:40] not in json.dumps(body)


def test_health_needs_no_key(keys: Keys) -> None:
    assert ask(keys.settings, "GET", "/health")[0] == 200
    assert ask(keys.settings, "GET", "//health/")[0] == 200


@pytest.mark.parametrize("form", ["Bearer {}", "bearer  {} ", "x-api-key"])
def test_a_key_is_taken_from_either_header(keys: Keys, form: str) -> None:
    if form == "x-api-key":
        headers = {"X-API-Key": keys.acme, "Authorization": "Basic abc"}
    else:
        headers = {"Authorization": form.format(keys.acme)}
    assert ask(keys.settings, "GET", "/v1/models", headers)[0] == 200


FAR, HERE = "10.0.0.9", "127.0.0.1"
FOREIGN, OWN = {"Origin": "https://somebody.example"}, {"Origin": "http://localhost:3000"}
OPERATORS = ("/metrics", "/metrics//targets/", "//v1//engines")
DRAIN = ("/v1/engines/d#1/drain", "//v1//engines//d%231/drain/")


@pytest.mark.parametrize(
    ("who", "peer", "page", "status"),
    [
        ("acme", FAR, {}, 403),
        ("ops", FAR, {}, 200),
        (None, HERE, {}, 200),
        (None, "::1", {}, 200),
        ("acme", HERE, {}, 200),
        ("nobody", HERE, {}, 401),
        # A web page from elsewhere is not this machine: it could read the answer.
        (None, HERE, FOREIGN, 401),
        ("acme", HERE, FOREIGN, 403),
        (None, HERE, OWN, 200),
    ],
)
def test_operators_paths_are_for_admins_and_this_machine(
    keys: Keys, who: str | None, peer: str, page: dict[str, str], status: int
) -> None:
    # Of those that are served here, events have no end.
    for path in (*OPERATORS, *(("/v1/events",) if status != 200 else ())):
        headers = page | keys.of(who)
        assert ask(keys.settings, "GET", path, headers, peer=peer)[0] == status, path


@pytest.mark.parametrize(
    ("who", "peer", "status"),
    [("acme", FAR, 403), ("acme", HERE, 403), (None, HERE, 401), ("ops", FAR, 200)],
)
def test_an_engine_is_drained_with_an_admin_key_alone(
    keys: Keys, who: str | None, peer: str, status: int
) -> None:
    table = a_table()
    for path in DRAIN:
        assert ask(keys.settings, "POST", path, keys.of(who), peer=peer, table=table)[0] == status
    assert table.asked == ([("drain", "d#1")] * 2 if status == 200 else [])


@pytest.mark.parametrize(
    ("settings", "peer", "read", "drained"),
    [
        ({}, HERE, 200, 200),
        ({}, FAR, 403, 403),
        ({"host": "0.0.0.0", "unauthenticated": True}, FAR, 200, 200),
    ],
)
def test_without_keys_operators_paths_are_for_this_machine_or_openly_for_all(
    settings: dict[str, Any], peer: str, read: int, drained: int
) -> None:
    for path in (*OPERATORS, "//v1/recording"):
        assert ask(load(settings), "GET", path, peer=peer)[0] == read
    assert ask(load(settings), "POST", DRAIN[0], peer=peer)[0] == drained


@pytest.mark.parametrize(("method", "path"), [*PATHS, ("GET", "/health")])
def test_a_page_asks_without_its_key_first_and_reads_refusals(
    keys: Keys, method: str, path: str
) -> None:
    """A browser leaves keys out of preflights."""
    page = {"Origin": "https://app.example"}
    preflight = page | {
        "Access-Control-Request-Method": method,
        "Access-Control-Request-Headers": "authorization",
    }
    table = a_table()
    status, found, _ = ask(keys.settings, "OPTIONS", path, preflight, table=table)
    assert status == 204
    assert table.asked == []
    assert found["access-control-allow-origin"] == "https://app.example"
    assert method in found["access-control-allow-methods"].split(", ")
    assert found["access-control-allow-headers"] == "authorization"
    status, found, _ = ask(keys.settings, method, path, page)
    assert status == (200 if path == "/health" else 401)
    assert found["access-control-allow-origin"] == "https://app.example"
    assert "X-Conversation-Id" in found["access-control-expose-headers"].split(", ")


def test_an_id_in_its_kept_form_is_nobodys(keys: Keys) -> None:
    table = a_table()
    path = "/v1/conversations/ops\tx"
    for method in ("GET", "DELETE"):
        assert ask(keys.settings, method, path, bearer(keys.acme), table=table)[0] == 404
    assert table.asked == []


def test_conversations_are_asked_for_by_tenant(keys: Keys) -> None:
    table = a_table()
    for method, path in (
        ("GET", "/v1/conversations?limit=5"),
        ("GET", "/v1/cache"),
        ("GET", "/v1/recording?after=7"),
        ("GET", "/v1/conversations/x"),
        ("DELETE", "/v1/conversations/ops/x"),
    ):
        assert ask(keys.settings, method, path, bearer(keys.acme), table=table)[0] == 200
    program = b'{"program_id": " p "}'
    ask(keys.settings, "POST", "/programs/release", bearer(keys.acme), body=program, table=table)
    report, tools = b'{"event": "end", "tool": "bash"}', "/v1/conversations/x/tools"
    ask(keys.settings, "POST", tools, bearer(keys.acme), body=report, table=table)
    assert table.asked == [
        ("conversations", 5, "acme"),
        ("cache", 60, "acme"),
        ("recording", 7, "acme"),
        ("conversation", "acme\tx"),
        ("release", "acme\tops/x"),
        ("release", "acme\tp"),
        ("report_tool", "acme\tx", ToolReport("bash", ended=True)),
    ]


def test_an_admin_sees_all_and_may_end_another_tenants(keys: Keys) -> None:
    table, admin = a_table(), bearer(keys.ops)
    for method, path in (
        ("GET", "/v1/conversations"),
        ("GET", "/v1/conversations?tenant=acme"),
        ("GET", "/v1/cache?minutes=5"),
        ("GET", "/v1/recording"),
        ("GET", "/v1/conversations/x"),
        ("DELETE", "/v1/conversations/x?tenant=acme"),
    ):
        assert ask(keys.settings, method, path, admin, table=table)[0] == 200
    assert table.asked == [
        ("conversations", 1000, None),
        ("conversations", 1000, "acme"),
        ("cache", 5, None),
        ("recording", 0, None),
        ("conversation", "ops\tx"),
        ("release", "acme\tx"),
    ]


@pytest.mark.parametrize(
    "path", ["/v1/conversations", "/v1/conversations/x", "/v1/cache", "/v1/recording"]
)
def test_who_is_no_admin_may_not_ask_for_another_tenant(keys: Keys, path: str) -> None:
    table = a_table()
    refused = ask(keys.settings, "GET", f"{path}?tenant=ops", bearer(keys.acme), table=table)
    assert (refused[0], refused[2]["error"]["code"]) == (403, "admin_key_required")
    assert refused[2]["error"]["type"] == "permission_error"
    own = ask(keys.settings, "GET", f"{path}?tenant=acme", bearer(keys.acme), table=table)
    assert own[0] == 200
    assert len(table.asked) == 1


def test_no_key_is_logged(keys: Keys, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        door = a_door(a_table(conversations=RuntimeError("a bug")), keys.settings)
        asked = {"path": "/v1/conversations", "client": ("10.0.0.9", 1)}
        with pytest.raises(RuntimeError, match="a bug"):
            asgi.exchange(door, b"", method="GET", headers=bearer(keys.acme), **asked)
    assert "unexpected error" in caplog.text
    assert keys.acme[17:] not in caplog.text


def test_a_key_file_that_is_missing_or_broken_is_said_at_start(keys: Keys) -> None:
    require_keys(load({}))
    require_keys(keys.settings)
    keys.path.write_text("{")
    with pytest.raises(SettingsError, match=r"keys_file: the key file .* is not usable"):
        require_keys(keys.settings)
    keys.path.unlink()
    with pytest.raises(SettingsError, match="conserve keys add TENANT --file"):
        require_keys(keys.settings)
    # As it comes up where that was not looked at.
    with pytest.raises(KeyFileError, match="there is no key file"):
        a_door(settings=keys.settings)


# --- A turn's request ----------------------------------------------------------------------------


def read(keys: Keys, key: str, body: Any, headers: dict[str, str] | None = None) -> Any:
    """The request as `read_request` has it, once the key was found good."""
    door = a_door(settings=keys.settings)
    sent = {**bearer(key), **(headers or {})}
    scope = asgi.scope_of(sent, path="/v1/chat/completions", client=("10.0.0.9", 1))
    door._access.admit(scope)
    return asgi.read_turn(scope.pop("path"), body, settings=keys.settings, **scope)


CHAT = {"messages": [{"role": "user", "content": "grüße"}], "model": "conserve-embedded"}


def test_a_turn_is_its_tenants(keys: Keys) -> None:
    stated = read(keys, keys.acme, {**CHAT, "conversation_id": "x"})
    assert stated.explicit_id == "acme\tx"
    assert stated.tenant == TurnTenant("acme", keys.content.tenants["acme"].limits)
    assert read(keys, keys.acme, CHAT).explicit_id is None
    further = {**CHAT, "messages": [*CHAT["messages"], {"role": "assistant"}, CHAT["messages"][0]]}
    acme, ops = (read(keys, key, further).chain for key in (keys.acme, keys.ops))
    assert acme is not None
    assert ops is not None
    assert len(acme.ends) == len(ops.ends) == 1
    assert acme.ends != ops.ends
    assert acme.root != ops.root


@pytest.mark.parametrize("given", [None, "the client's own", "", 5, ["x"]])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_the_salt_is_the_servers_whatever_the_client_says(
    keys: Keys, given: Any, encoding: str
) -> None:
    body = CHAT if given is None else {**CHAT, "cache_salt": given}
    request = read(keys, keys.acme, f" {json.dumps(body)}".encode(encoding))
    wanted = {**CHAT, "cache_salt": keys.content.cache_salt("acme")}
    assert request.body == json.loads(request.raw) == wanted
    assert request.raw.count(b"cache_salt") == 1


# --- Without keys --------------------------------------------------------------------------------
