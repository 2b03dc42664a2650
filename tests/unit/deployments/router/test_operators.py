"""A router's answers to operators and their tools: probes, metrics, events and the dashboard."""

import asyncio
import importlib.metadata
import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from conserve.settings import Settings
from deployments.messages import EventPage, EventQuery
from deployments.router import operators
from deployments.router.frontdoor import FrontDoor
from deployments.router.operators import DASHBOARD, DASHBOARD_FILES, DASHBOARD_PATHS, Probes
from deployments.table_client import TableUnavailable
from tests.checkout import ROOT
from tests.unit.deployments.asgi import ask
from tests.unit.deployments.router.fakes import Keys, a_door
from tests.unit.deployments.stub_table import StubTable, listed_engine

# --- Probes ---------------------------------------------------------------------------------------


def probed(door: FrontDoor, path: str, host: str = "10.0.0.7:8000") -> httpx.Response:
    """Ask as Kubernetes does: from another machine, by the pod's address, without a key."""
    return ask(door, "GET", path, host, "10.0.0.1")


def heard(can_serve: bool | None, settings: Settings | None = None) -> FrontDoor:
    """Return a router that was told this by its table, which it does not ask."""
    door = a_door(settings=settings)
    door.probes.heard(can_serve)
    return door


def test_a_router_that_cannot_serve_lives() -> None:
    for door in (a_door(), heard(False)):
        assert probed(door, "/live").status_code == 200
        assert probed(door, "/ready").status_code == 503


def test_serves_own_answer_is_success_and_nothing_else() -> None:
    answer = probed(heard(True), "/-/healthz", host="localhost:8000")
    assert (answer.status_code, answer.text) == (200, "success")
    answer = probed(heard(False), "/-/healthz", host="localhost:8000")
    assert answer.status_code == 503
    assert "success" not in answer.text


def test_one_that_drains_is_not_ready_and_lives() -> None:
    door = heard(True)
    assert probed(door, "/ready").json() == {"status": "ready"}
    door.probes.draining = True
    door.probes.heard(True)
    for path in ("/ready", "/-/healthz"):
        assert probed(door, path).status_code == 503
        assert "drain" in probed(door, path).text
    assert probed(door, "/live").status_code == 200


def test_a_table_that_is_silent_or_starts_again_counts_only_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = [0.0]
    monkeypatch.setattr(operators, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    probes = Probes(Settings())
    assert "starting" in str(probes.not_ready())
    probes.heard(None)
    assert "no decoder" in str(probes.not_ready())
    probes.heard(True)
    now_s[0] = 14.0
    assert probes.not_ready() is None
    now_s[0] = 16.0
    assert "has not answered for 15 s" in str(probes.not_ready())
    # The new one does not know its engines yet; turns wait for them.
    probes.heard(None)
    assert probes.not_ready() is None
    probes.heard(False)
    assert "no decoder" in str(probes.not_ready())


def test_versions_are_those_that_are_installed() -> None:
    versions = probed(a_door(), "/version").json()
    assert versions.pop("model") == "conserve-embedded"
    assert list(versions) == ["conserve", "vllm", "lmcache", "ray"]
    assert versions["lmcache"] == importlib.metadata.version("lmcache")
    assert versions["vllm"].count(".") >= 2


@pytest.mark.parametrize(
    ("path", "status"), [("/live", 200), ("/ready", 200), ("/-/healthz", 200), ("/version", 401)]
)
def test_probes_need_no_key(tmp_path: Path, path: str, status: int) -> None:
    assert probed(heard(True, Keys(tmp_path).settings), path).status_code == status


# --- Metrics --------------------------------------------------------------------------------------

ENGINES = [
    listed_engine("d1", url="http://127.0.0.1:41001", cache_metrics="127.0.0.1:7611"),
    listed_engine("p1", "prefiller", url="http://127.0.0.1:41002", cache_metrics="127.0.0.1:7611"),
    listed_engine("d2", url="http://10.0.0.7:41003", cache_metrics="127.0.0.1:7611"),
]


def metrics_in(answers_in_s: float | None) -> StubTable:
    """Return a table that answers `/metrics` after some seconds, or not at all."""

    async def metrics() -> bytes:
        if answers_in_s is None:
            raise TableUnavailable("the conversation table is down")
        await asyncio.sleep(answers_in_s)
        return b"conserve_table_up 1.0\n"

    return StubTable(metrics=metrics)


def get(
    path: str, table: StubTable, peer: str = "127.0.0.1", headers: dict[str, str] | None = None
) -> httpx.Response:
    door = a_door(table, Settings(unauthenticated=True, host="0.0.0.0"))
    return ask(door, "GET", path, "router", peer, headers=headers)


def listed(peer: str) -> list[tuple[list[str], dict[str, str]]]:
    answer = get("/metrics/targets", StubTable(engines=ENGINES), peer)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    return [(one["targets"], one["labels"]) for one in json.loads(answer.content)]


def test_engines_and_each_lmcache_server_are_listed_once() -> None:
    assert listed("127.0.0.1") == [
        (["127.0.0.1:41001"], {"part": "engine", "role": "decoder", "replica": "d1"}),
        (["127.0.0.1:41002"], {"part": "engine", "role": "prefiller", "replica": "p1"}),
        (["10.0.0.7:41003"], {"part": "engine", "role": "decoder", "replica": "d2"}),
        (["127.0.0.1:7611"], {"part": "lmcache"}),
    ]


def test_another_machine_is_not_told_of_what_it_cannot_reach() -> None:
    assert [targets for targets, _ in listed("10.0.0.9")] == [["10.0.0.7:41003"]]


@pytest.mark.parametrize("answers_in_s", [None, 60.0])
def test_a_scrape_is_answered_in_time_without_the_table(answers_in_s: float | None) -> None:
    """Prometheus would drop what comes later, and know nothing of the router."""
    headers = {"X-Prometheus-Scrape-Timeout-Seconds": "0.1"}
    answer = get("/metrics", metrics_in(answers_in_s), headers=headers)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    described, kind, value = answer.text.splitlines()
    assert described.startswith("# HELP conserve_table_up 1: the conversation table answered")
    assert (kind, value) == ("# TYPE conserve_table_up gauge", "conserve_table_up 0.0")


@pytest.mark.parametrize("said", ["", "soon", "-1", "inf", "nan", "0", "10"])
def test_a_table_that_answers_is_heard_whatever_the_header_says(said: str) -> None:
    headers = {"X-Prometheus-Scrape-Timeout-Seconds": said}
    assert get("/metrics", metrics_in(0.05), headers=headers).text == "conserve_table_up 1.0\n"


def test_other_clients_get_503_without_the_table() -> None:
    answer = get("/metrics", metrics_in(None))
    assert answer.status_code == 503
    assert "table" in answer.json()["error"]["message"]


# --- Events ---------------------------------------------------------------------------------------


def telling(*answers: EventPage | Exception) -> StubTable:
    """Return a table that answers once with each of these, and then not at all."""
    left = [*answers]

    async def events(query: EventQuery) -> EventPage:
        if not left:
            await asyncio.Event().wait()
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return StubTable(events=events)


class Listener:
    """A request for events, until what it waits for has come, or it is refused."""

    def __init__(
        self, door: FrontDoor, query: str = "", peer: str = "127.0.0.1", **headers: str
    ) -> None:
        self.sent: list[Any] = []
        self._gone, self._heard = asyncio.Event(), asyncio.Event()
        scope = {
            "type": "http", "method": "GET", "path": "/v1/events", "raw_path": b"/v1/events",
            "query_string": query.encode(), "root_path": "", "client": (peer, 5),
            "headers": [(name.replace("_", "-").encode(), value.encode())
                        for name, value in {"host": "127.0.0.1", **headers}.items()],
        }  # fmt: skip
        self.served = asyncio.ensure_future(door(scope, self._receive, self._send))

    async def _receive(self) -> Any:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)
        self._heard.set()

    @property
    def status(self) -> int:
        status: int = self.sent[0]["status"]
        return status

    @property
    def text(self) -> str:
        return b"".join(one.get("body", b"") for one in self.sent[1:]).decode()

    async def until(self, there: Callable[["Listener"], Any]) -> "Listener":
        async with asyncio.timeout(10):
            while not (self.sent and there(self)):
                await self._heard.wait()
                self._heard.clear()
        return self

    async def leave(self) -> None:
        self._gone.set()
        await asyncio.wait_for(self.served, 10)


async def test_events_are_told_in_order_with_their_numbers() -> None:
    told = EventPage(9, 0, [(8, "place", b'{"number":8}'), (9, "start", b'{"number":9}')])
    table = telling(EventPage(7, 0, []), told, EventPage(12, 2, [(12, "end", b"{}")]))
    listener = await Listener(a_door(table)).until(lambda one: "event: end" in one.text)
    assert listener.status == 200
    headers = dict(listener.sent[0]["headers"])
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert listener.text.split("\n\n")[1:] == [
        'id: 8\nevent: place\ndata: {"number":8}',
        'id: 9\nevent: start\ndata: {"number":9}',
        'event: missed\ndata: {"events":2}',
        "id: 12\nevent: end\ndata: {}",
        "",
    ]
    await listener.leave()
    # First where the log is; then what has come since, and since that.
    assert [asked.after for _, asked in table.asked] == [None, 7, 9, 12]
    assert [asked.patience_s for _, asked in table.asked] == [0.0, *[operators._QUIET_S] * 3]


async def test_a_stream_ends_with_its_router() -> None:
    """Its listener goes on at another one."""
    door = a_door(telling(EventPage(7, 0, []), EventPage(8, 0, [(8, "end", b"{}")])))
    listener = Listener(door)
    door.probes.draining = True
    await listener.until(lambda one: one.sent[-1].get("more_body") is False)


@pytest.mark.parametrize(
    ("query", "headers", "asked"),
    [
        ("after=5", {"last_event_id": "17"}, (17, (), None, None)),
        ("kind=pause&kind=restore", {}, (None, ("pause", "restore"), None, None)),
        ("conversation=c%20d", {}, (None, (), None, "c d")),
        ("tenant=acme&conversation=c", {}, (None, (), "acme", "acme\tc")),
    ],
)
async def test_a_listener_says_of_what_it_wants_to_hear(
    query: str, headers: dict[str, str], asked: tuple[Any, ...]
) -> None:
    table = telling(EventPage(30, 0, [(30, "end", b"{}")]))
    listener = Listener(a_door(table), query, **headers)
    await listener.until(lambda one: "event: end" in one.text)
    assert table.asked[0] == ("events", EventQuery(*asked))
    await listener.leave()


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("after=-1", "after"),
        ("kind=x", "kind"),
    ],
)
async def test_what_is_not_there_is_refused(query: str, says: str) -> None:
    listener = await Listener(a_door(telling()), query).until(lambda one: one.text)
    assert listener.status == 400
    assert json.loads(listener.text)["error"]["param"] == says


async def test_a_table_that_starts_anew_ends_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    sleep = asyncio.sleep

    async def at_once(delay_s: float) -> None:
        slept.append(delay_s)
        await sleep(0)

    table = telling(TableUnavailable(), EventPage(3, 0, []), EventPage(3, 0, []))
    listener = Listener(a_door(table))
    monkeypatch.setattr(operators.asyncio, "sleep", at_once)
    await listener.until(lambda one: "nothing new" in one.text)
    assert ": the conversation table is being restarted\n\n" in listener.text
    assert slept.count(1) == 1
    await listener.leave()


async def test_so_many_may_listen_and_who_leaves_makes_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(operators, "_LISTENERS", 2)
    door = a_door(telling())
    listening = [await Listener(door).until(lambda one: one.text) for _ in range(2)]
    refused = await Listener(door).until(lambda one: one.text)
    assert refused.status == 429
    assert dict(refused.sent[0]["headers"])[b"retry-after"] == b"30"
    await listening[0].leave()
    assert (await Listener(door).until(lambda one: one.text)).status == 200


# --- The dashboard --------------------------------------------------------------------------------

FOLDER = ROOT / "deployments" / "router" / "page"


def test_the_page_and_its_parts_are_served_as_they_are() -> None:
    for path, file in zip(DASHBOARD_PATHS, ("index.html", *DASHBOARD_FILES), strict=True):
        answer = ask(a_door(), "GET", path)
        assert answer.status_code == 200, path
        assert answer.content == (FOLDER / file).read_bytes()
        assert answer.headers["cache-control"] == "no-cache"
        assert answer.headers["x-content-type-options"] == "nosniff"
        kinds = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
        assert answer.headers["content-type"].partition(";")[0] == kinds[Path(file).suffix]


def test_the_page_may_load_and_ask_its_own_server_alone() -> None:
    told = ask(a_door(), "GET", DASHBOARD).headers["content-security-policy"]
    policy = dict(part.strip().partition(" ")[::2] for part in told.split(";"))
    assert policy == {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    for file in FOLDER.iterdir():
        text = file.read_text()
        # Of the picture in the tab, a name and no address.
        assert set(re.findall(r"https?:[^'\s]*", text)) <= {"http://www.w3.org/2000/svg"}, file
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b", text)
    page = (FOLDER / "index.html").read_text()
    assert not re.search(r"\son\w+=|\sstyle=|<style|<script(?! type=\"module\" src=)", page)


def test_the_page_needs_no_key_and_what_it_asks_for_does(tmp_path: Path) -> None:
    door = a_door(settings=Keys(tmp_path).settings)
    others = ("/dashboard/x", "/dashboards", "/v1/events", "/v1/engines", "/v1/conversations")
    for path in (*DASHBOARD_PATHS, *others):
        answer = ask(door, "GET", path, peer="10.0.0.9")
        assert answer.status_code == (401 if path in others else 200)


def test_the_page_is_in_the_wheel() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    package = ROOT / "deployments" / "router"
    globs = project["tool"]["setuptools"]["package-data"]["deployments.router"]
    held = {path for each in globs for path in package.glob(each)}
    assert held == set(FOLDER.iterdir())
