"""`GET /v1/events`: what listeners are told, and who may listen."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conserve.settings import Settings
from conserve.tenants import KeyFile, keyfile
from deployments.messages import EventPage, EventQuery
from deployments.router import operators
from deployments.router.frontdoor import FrontDoor
from deployments.table.table_client import TableUnavailable
from tests.unit.deployments.stub_table import StubTable

Answer = EventPage | Exception


class Table(StubTable):
    """Answers once with each of these, and then not at all."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.asked: list[EventQuery] = []

    async def call(self, method: str, *arguments: Any) -> Any:
        assert method == "events"
        self.asked.append(arguments[0])
        if not self.answers:
            await asyncio.Event().wait()
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


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
        self._task = asyncio.ensure_future(door(scope, self._receive, self._send))

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
        await asyncio.wait_for(self._task, 10)


def a_door(table: Table, settings: Settings | None = None) -> FrontDoor:
    return FrontDoor(settings or Settings(), table, "r")  # type: ignore[arg-type]


async def test_events_are_told_in_order_with_their_numbers() -> None:
    told = EventPage(9, 0, [(8, "place", b'{"number":8}'), (9, "start", b'{"number":9}')])
    table = Table(EventPage(7, 0, []), told, EventPage(12, 2, [(12, "end", b"{}")]))
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
    assert [asked.after for asked in table.asked] == [None, 7, 9, 12]
    assert [asked.patience_s for asked in table.asked] == [0.0, *[operators._QUIET_S] * 3]


async def test_a_stream_ends_with_its_router() -> None:
    """Its listener goes on at another one."""
    door = a_door(Table(EventPage(7, 0, []), EventPage(8, 0, [(8, "end", b"{}")])))
    listener = Listener(door)
    door.probes.draining = True
    await listener.until(lambda one: one.sent[-1].get("more_body") is False)


@pytest.mark.parametrize(
    ("query", "headers", "asked"),
    [
        ("after=5", {}, (5, (), None, None)),
        ("after=5", {"last_event_id": "17"}, (17, (), None, None)),
        ("kind=pause&kind=restore", {}, (None, ("pause", "restore"), None, None)),
        ("conversation=c%20d", {}, (None, (), None, "c d")),
        ("tenant=acme", {}, (None, (), "acme", None)),
        ("tenant=acme&conversation=c", {}, (None, (), "acme", "acme\tc")),
    ],
)
async def test_a_listener_says_of_what_it_wants_to_hear(
    query: str, headers: dict[str, str], asked: tuple[Any, ...]
) -> None:
    table = Table(EventPage(30, 0, [(30, "end", b"{}")]))
    listener = Listener(a_door(table), query, **headers)
    await listener.until(lambda one: "event: end" in one.text)
    assert table.asked[0] == EventQuery(*asked)
    await listener.leave()


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("after=-1", "after"),
        ("after=²", "after"),
        ("after=" + "9" * 19, "after"),
        ("kind=x", "kind"),
    ],
)
async def test_what_is_not_there_is_refused(query: str, says: str) -> None:
    listener = await Listener(a_door(Table()), query).until(lambda one: one.text)
    assert listener.status == 400
    assert json.loads(listener.text)["error"]["param"] == says


async def test_a_table_that_starts_anew_ends_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    sleep = asyncio.sleep

    async def at_once(delay_s: float) -> None:
        slept.append(delay_s)
        await sleep(0)

    table = Table(TableUnavailable(), EventPage(3, 0, []), EventPage(3, 0, []))
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
    door = a_door(Table())
    listening = [await Listener(door).until(lambda one: one.text) for _ in range(2)]
    refused = await Listener(door).until(lambda one: one.text)
    assert refused.status == 429
    assert dict(refused.sent[0]["headers"])[b"retry-after"] == b"30"
    await listening[0].leave()
    assert (await Listener(door).until(lambda one: one.text)).status == 200


async def test_operators_alone_may_listen(tmp_path: Path) -> None:
    content, acme = KeyFile.new().with_key("acme", "2026-01-31")
    content, ops = content.with_key("ops", "2026-01-31", admin=True)
    path = tmp_path / "keys.json"
    keyfile.write(path, content)
    settings = Settings(host="0.0.0.0", keys_file=str(path))
    for key, status in ((ops, 200), (acme, 403)):
        listener = Listener(a_door(Table(), settings), peer="10.0.0.9", x_api_key=key)
        await listener.until(lambda one: one.text)
        assert listener.status == status
