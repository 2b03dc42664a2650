"""Answers whose router is lost: made all the same, kept for a while, and read by who asks again."""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from conserve import wire
from conserve.apis import CHAT
from conserve.direct import Alone, Desk, Ended, Rejoined
from conserve.holdings import Holdings
from conserve.turn import TurnKey
from conserve.wire import ALONE_S, LEAVE_PATH, TURN_HEADER, DecoderTurn, Reader
from deployments.engine import turns
from tests.unit.deployments.asgi import exchanged, scope_of
from tests.unit.deployments.engine.following import engine_turns
from tests.unit.deployments.table.virtual_time import in_virtual_time

KEY = TurnKey("c", 1, 256)
LOST, NEXT = Reader("lost", 1), Reader("next", 7)
PARTS = [b"data: one\n\n", b"data: two\n\n"]
END = b"data: [DONE]\n\n"
TOLD = DecoderTurn(KEY, reader=LOST, digest=b"asked")
AGAIN = DecoderTurn(KEY, reader=NEXT, digest=b"asked", rejoins=True)


@dataclass
class Exchange:
    """A router's exchange with a decoder, which breaks when it is told to."""

    app: Any
    told: DecoderTurn
    sent: list[Any] = field(default_factory=list)
    broken: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._body = [{"type": "http.request", "body": b"{}", "more_body": False}]
        headers = {TURN_HEADER: self.told.header()}
        scope = scope_of(headers, method="POST", path=CHAT)
        self.task = asyncio.ensure_future(self.app(scope, self._receive, self._send))

    async def _receive(self) -> Any:
        if self._body:
            return self._body.pop()
        await self.broken.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if not self.broken.is_set():
            self.sent.append(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            # As servers have it.
            self.broken.set()
            await asyncio.sleep(0.01)

    @property
    def read(self) -> bytes:
        return b"".join(one.get("body", b"") for one in self.sent)


class Scene:
    """A decoder that sends two parts of an answer, and its end when it may go on."""

    def __init__(self) -> None:
        self.desk = Desk(Holdings(), 60)
        self.desk.outbox.register()
        self.turns = engine_turns(self._app, desk=self.desk)
        self.goes_on = asyncio.Event()
        self.aborted = False

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        (turn,) = [one for one in self.turns.running.values() if not one.started]
        turn.started = turn.finished = 1
        turn.stats.prompt_tokens = 3
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for part in PARTS:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        leaving = asyncio.ensure_future(receive())
        going_on = asyncio.ensure_future(self.goes_on.wait())
        await asyncio.wait([leaving, going_on], return_when="FIRST_COMPLETED")
        going_on.cancel()
        if leaving.done():
            self.aborted = True
            return
        leaving.cancel()
        await send({"type": "http.response.body", "body": END, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def begun(self, told: DecoderTurn = TOLD) -> Exchange:
        exchange = Exchange(self.turns, told)
        await asyncio.sleep(0.01)
        return exchange

    async def alone(self) -> None:
        """A turn runs whose router is lost."""
        exchange = await self.begun()
        exchange.broken.set()
        await asyncio.sleep(0.01)

    def told(self) -> list[Any]:
        report = self.desk.outbox.next()
        if report is None:
            return []
        self.desk.outbox.answered(report.number)
        return list(report.events)


@pytest.mark.parametrize("ends_first", [True, False])
@in_virtual_time
async def test_who_asks_again_has_the_whole_answer(ends_first: bool) -> None:
    scene = Scene()
    await scene.alone()
    assert scene.told() == [Alone(KEY, b"asked")]
    if ends_first:
        scene.goes_on.set()
        await asyncio.sleep(5)
        # The next turn would follow an answer that its client does not have.
        assert scene.told() == []
    again = await scene.begun(AGAIN)
    scene.goes_on.set()
    await again.task
    assert again.read.startswith(b"".join(PARTS))
    assert again.read.endswith(END)
    assert again.read.count(b"data: ") == 3
    rejoined, ended = scene.told()
    assert rejoined == Rejoined(KEY, "next")
    assert (type(ended), ended.turn, ended.completed) == (Ended, KEY, True)
    assert not scene.turns.running


@pytest.mark.parametrize("ends_first", [True, False])
@in_virtual_time
async def test_an_answer_that_nobody_asks_for_ends(ends_first: bool) -> None:
    scene = Scene()
    await scene.alone()
    if ends_first:
        scene.goes_on.set()
    await asyncio.sleep(ALONE_S - 1)
    assert [type(one) for one in scene.told()] == [Alone]
    await asyncio.sleep(2)
    (ended,) = scene.told()
    assert ended.completed is False
    assert scene.aborted is not ends_first
    assert not scene.turns.running
    # Who asks then is refused, and asks the table.
    assert (await scene.begun(AGAIN)).sent[0]["status"] == wire.REFUSED_STATUS


@in_virtual_time
async def test_an_answer_that_is_read_to_its_end_was_never_alone() -> None:
    scene = Scene()
    exchange = await scene.begun()
    scene.goes_on.set()
    await exchange.task
    assert [type(one) for one in scene.told()] == [Ended]


@pytest.mark.parametrize(("after_s", "is_there"), [(5, True), (20, False)])
@in_virtual_time
async def test_an_answer_that_has_ended_is_kept_for_a_moment(
    after_s: float, is_there: bool
) -> None:
    """Its router may have died with the end of it."""
    scene = Scene()
    exchange = await scene.begun()
    scene.goes_on.set()
    await exchange.task
    (ended,) = scene.told()
    assert (ended.completed, ended.digest) == (True, b"asked")
    await asyncio.sleep(after_s)
    other = DecoderTurn(KEY, reader=NEXT, digest=b"Asked", rejoins=True)
    assert (await scene.begun(other)).sent[0]["status"] == wire.REFUSED_STATUS
    again = await scene.begun(AGAIN)
    assert (again.sent[0]["status"] == 200) is is_there
    assert again.read.endswith(END) is is_there


@in_virtual_time
async def test_a_reader_that_is_lost_too_begins_the_wait_anew() -> None:
    scene = Scene()
    await scene.alone()
    await asyncio.sleep(ALONE_S - 1)
    again = await scene.begun(AGAIN)
    await asyncio.sleep(5)
    assert not scene.aborted
    again.broken.set()
    await asyncio.sleep(ALONE_S - 1)
    assert not scene.aborted
    third = await scene.begun(AGAIN)
    scene.goes_on.set()
    await third.task
    assert third.read.endswith(END)


@in_virtual_time
async def test_a_client_that_leaves_ends_its_turn_at_once() -> None:
    scene = Scene()
    await scene.begun()
    for reader, ends in ((NEXT, False), (LOST, True)):
        await exchanged(scene.turns, json.dumps(reader).encode(), method="POST", path=LEAVE_PATH)
        await asyncio.sleep(0.01)
        assert scene.aborted is ends
    (ended,) = scene.told()
    assert ended.completed is False


@pytest.mark.parametrize("has_reader", [True, False])
@in_virtual_time
async def test_only_the_same_request_rejoins_and_only_what_is_alone(has_reader: bool) -> None:
    scene = Scene()
    if has_reader:
        await scene.begun()
    else:
        await scene.alone()
    asked = AGAIN if has_reader else DecoderTurn(KEY, reader=NEXT, digest=b"Asked", rejoins=True)
    other = await scene.begun(asked)
    assert other.sent[0]["status"] == wire.REFUSED_STATUS
    assert not other.read


@in_virtual_time
async def test_the_next_turn_of_its_history_ends_what_is_alone() -> None:
    scene = Scene()
    await scene.alone()
    await scene.begun(DecoderTurn(TurnKey("other", 2, 512), reader=NEXT, digest=b"else"))
    assert not scene.aborted
    scene.told()
    await scene.begun(DecoderTurn(TurnKey("c", 1, 768), reader=NEXT, digest=b"different"))
    assert scene.aborted
    assert [(one.turn, one.completed) for one in scene.told()] == [(KEY, False)]


@in_virtual_time
async def test_of_too_many_answers_without_a_reader_the_oldest_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(turns, "_MOST_ALONE", 2)
    scene = Scene()
    for n in range(3):
        told = DecoderTurn(TurnKey(f"c{n}", 1, 256 + n), reader=LOST, digest=b"asked")
        exchange = await scene.begun(told)
        exchange.broken.set()
        await asyncio.sleep(0.01)
    assert [one.key.history_id for one in scene.turns.running.values()] == ["c1", "c2"]


@in_virtual_time
async def test_a_turn_that_comes_straight_rejoins_too() -> None:
    scene = Scene()
    await scene.alone()
    straight = DecoderTurn(straight=wire.Straight(b"end"), reader=NEXT, digest=b"asked")
    again = await scene.begun(straight)
    headers = dict(again.sent[0]["headers"])
    assert wire.read_key(headers[TURN_HEADER.encode()].decode()) == KEY
