"""`Idempotency-Key`: one turn for all requests that have it, and the same answer."""

import asyncio
import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conserve.errors import ApiError
from conserve.settings import Settings
from conserve.tenants import KeyFile, keyfile
from deployments.router import idempotency
from deployments.router.access import Access
from deployments.router.frontdoor import FrontDoor
from deployments.router.idempotency import Idempotency
from tests.unit.deployments.stub_table import StubTable

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
ERROR = b'data: {"error": {"message": "lost"}}\n\n'


class Turns:
    """Serves turns in the engines' place: each as a stream of these parts, once it may.

    Attributes:
        bodies: of the turns that were begun.
        left: how many turns were told that their client has left.
    """

    def __init__(self, *parts: bytes, status: int = 200, free: bool = True) -> None:
        self.parts, self.status = parts or (b"one ", b"two ", b"three"), status
        self.bodies: list[bytes] = []
        self.left = 0
        self.goes_on, self.ends = asyncio.Event(), asyncio.Event()
        if free:
            self.goes_on.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.bodies.append((await receive())["body"])
        number = str(len(self.bodies)).encode()
        leaving = asyncio.ensure_future(receive())
        serving = asyncio.ensure_future(self._serve(send, number))
        await asyncio.wait({leaving, serving}, return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            assert leaving.result()["type"] == "http.disconnect"
            self.left += 1
            serving.cancel()
            await self.ends.wait()
            return
        leaving.cancel()
        serving.result()

    async def _serve(self, send: Any, number: bytes) -> None:
        await send({
            "type": "http.response.start", "status": self.status, "headers": [(b"turn", number)],
        })  # fmt: skip
        first, *rest = self.parts
        await send({"type": "http.response.body", "body": first, "more_body": True})
        await self.goes_on.wait()
        for part in rest:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Client:
    """A connection with one request, and what it has of the answer."""

    def __init__(self, door: Any, key: str | None = "k", body: bytes = b"{}", **more: Any) -> None:
        self.sent: list[Any] = []
        self.leaves = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()
        self._body = body
        self._scope = {
            "type": "http",
            "method": "POST",
            "path": CHAT,
            "headers": [] if key is None else [(b"idempotency-key", key.encode())],
            **more,
        }
        self.done = asyncio.ensure_future(door(self._scope, self._receive, self._send))

    async def _receive(self) -> Any:
        if self._body is not None:
            body, self._body = self._body, None  # type: ignore[assignment]
            return {"type": "http.request", "body": body, "more_body": False}
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await self.reads.wait()
        self.sent.append(message)

    async def answered(self) -> tuple[int, bytes, bool]:
        """Return the status, the body, and whether it is a repeated one."""
        await asyncio.wait_for(self.done, 10)
        start, *parts = self.sent
        replayed = dict(start["headers"]).get(b"idempotent-replayed") == b"true"
        return start["status"], b"".join(part["body"] for part in parts), replayed

    async def has(self, body: bytes) -> None:
        """Wait until it has this much of the answer."""
        async with asyncio.timeout(10):
            while b"".join(part.get("body", b"") for part in self.sent) != body:  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    async def leave(self) -> None:
        self.leaves.set()
        await self.done


def once(turns: Turns, now_s: Callable[[], float] = lambda: 0.0) -> Idempotency:
    return Idempotency(turns, Settings(), now_s)


pytestmark = pytest.mark.anyio


async def test_two_at_a_time_are_one_turn() -> None:
    turns = Turns(free=False)
    door = once(turns)
    first = Client(door)
    await first.has(b"one ")
    second = Client(door)
    # It gets at once what the first one has, and then the same tokens.
    await second.has(b"one ")
    turns.goes_on.set()
    assert await first.answered() == (200, b"one two three", False)
    assert await second.answered() == (200, b"one two three", True)
    assert len(turns.bodies) == 1
    assert await Client(door).answered() == (200, b"one two three", True)
    assert len(turns.bodies) == 1


async def test_without_a_key_each_is_a_turn() -> None:
    turns = Turns()
    door = once(turns)
    for key in (None, "", "a", "b"):
        assert await Client(door, key).answered() == (200, b"one two three", False)
    assert turns.bodies == [b"{}"] * 4


async def test_a_key_is_one_of_a_path() -> None:
    turns = Turns()
    door = once(turns)
    await Client(door).answered()
    assert (await Client(door, path=MESSAGES).answered())[2] is False


async def test_a_key_is_one_of_a_tenant(tmp_path: Path) -> None:
    """And so none learns of another's answers."""
    content, acme = KeyFile.new().with_key("acme", "2026-01-31")
    content, globex = content.with_key("globex", "2026-01-31")
    keyfile.write(tmp_path / "keys.json", content)
    access = Access(Settings(keys_file=str(tmp_path / "keys.json")))
    turns = Turns()
    once_only = once(turns)

    async def door(scope: Any, receive: Any, send: Any) -> None:
        access.admit(scope)
        await once_only(scope, receive, send)

    async def asked(key: str) -> bool:
        headers = [(b"idempotency-key", b"k"), (b"x-api-key", key.encode())]
        return (await Client(door, headers=headers).answered())[2]

    assert [await asked(key) for key in (acme, globex, acme, globex)] == [False, False, True, True]


@pytest.mark.parametrize("running", [True, False])
async def test_another_body_is_refused(running: bool) -> None:
    turns = Turns(free=not running)
    door = once(turns)
    first = Client(door)
    await first.has(b"one " if running else b"one two three")
    with pytest.raises(ApiError, match="another body") as refused:
        await Client(door, body=b'{"n": 2}').answered()
    assert (refused.value.status, refused.value.code) == (422, "idempotency_key_reused")
    turns.goes_on.set()
    assert (await first.answered())[0] == 200
    assert len(turns.bodies) == 1


async def test_refusals_have_the_shape_of_the_path() -> None:
    """Through the whole door."""
    door = FrontDoor(Settings(), StubTable(), "router")
    headers = [(b"content-type", b"application/json"), (b"idempotency-key", b"k" * 256)]
    client = Client(door, path=MESSAGES, headers=headers)
    status, body, _ = await client.answered()
    assert status == 400
    said = json.loads(body)
    assert said["type"] == "error"
    assert "at most 255 characters" in said["error"]["message"]


@pytest.mark.parametrize(
    "turns",
    [
        pytest.param(lambda: Turns(status=503), id="a failure"),
        pytest.param(lambda: Turns(status=429), id="a refusal"),
        pytest.param(lambda: Turns(b"one ", ERROR, b"data: [DONE]\n\n"), id="within a stream"),
    ],
)
async def test_an_error_is_not_kept(turns: Callable[[], Turns]) -> None:
    served = turns()
    door = once(served)
    first, second = Client(door), Client(door)
    # What waits for the same turn shares its end.
    assert (await first.answered())[:2] == (await second.answered())[:2]
    assert len(served.bodies) == 1
    await Client(door).answered()
    assert len(served.bodies) == 2


async def test_a_bug_reaches_all_that_wait() -> None:
    class Broken(Turns):
        async def _serve(self, send: Any, number: bytes) -> None:
            await self.goes_on.wait()
            raise KeyError("a bug")

    turns = Broken(free=False)
    door = once(turns)
    clients = [Client(door), Client(door)]
    while not turns.bodies:  # noqa: ASYNC110
        await asyncio.sleep(0)
    turns.goes_on.set()
    for client in clients:
        with pytest.raises(KeyError):
            await client.answered()
    with contextlib.suppress(KeyError):
        await Client(door).answered()
    assert len(turns.bodies) == 2


async def test_a_turn_goes_on_for_a_client_that_tries_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(idempotency, "_ALONE_S", 0.05)
    turns = Turns(free=False)
    door = once(turns)
    first = Client(door)
    await first.has(b"one ")
    await first.leave()
    again = Client(door)
    await again.has(b"one ")
    await asyncio.sleep(0.2)
    turns.goes_on.set()
    assert await again.answered() == (200, b"one two three", True)
    assert (len(turns.bodies), turns.left) == (1, 0)


async def test_one_that_is_left_alone_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a while, and then the key begins another turn."""
    monkeypatch.setattr(idempotency, "_ALONE_S", 0.05)
    turns = Turns(free=False)
    door = once(turns)
    first, second = Client(door), Client(door)
    await second.has(b"one ")
    await first.leave()
    await asyncio.sleep(0.2)
    assert turns.left == 0
    await second.leave()
    async with asyncio.timeout(10):
        while not turns.left:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    another = Client(door)
    await another.has(b"one ")
    # The first one ends only now, and changes nothing about the second.
    turns.ends.set()
    await asyncio.sleep(0.01)
    turns.goes_on.set()
    assert await Client(door).answered() == (200, b"one two three", True)
    assert await another.answered() == (200, b"one two three", False)
    assert len(turns.bodies) == 2


async def test_an_answer_that_comes_when_its_client_has_left_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(idempotency, "_ALONE_S", 0.05)
    turns = Turns(free=False)
    door = once(turns)
    first = Client(door)
    await first.has(b"one ")
    await first.leave()
    turns.goes_on.set()
    await asyncio.sleep(0.2)
    assert await Client(door).answered() == (200, b"one two three", True)
    assert len(turns.bodies) == 1


async def test_answers_are_kept_for_ten_minutes() -> None:
    now_s = [0.0]
    turns = Turns()
    door = once(turns, lambda: now_s[0])
    await Client(door).answered()
    now_s[0] = 599.0
    assert (await Client(door).answered())[2]
    now_s[0] = 601.0
    assert not (await Client(door).answered())[2]


async def test_the_oldest_answers_are_dropped_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency, "_KEPT_BYTES", 10_000)
    turns = Turns(b"x" * 2000)
    door = once(turns)
    for number in range(5):
        await Client(door, str(number)).answered()
    assert door._kept_bytes <= 10_000
    assert (await Client(door, "4").answered())[2]
    assert not (await Client(door, "0").answered())[2]


async def test_an_answer_that_is_too_long_is_given_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parts are not all held, and the turn never runs a second time."""
    monkeypatch.setattr(idempotency, "_ANSWER_BYTES", 20_000)
    parts = [b"%04d" % number + b"x" * 1000 for number in range(100)]
    turns = Turns(*parts, free=False)
    door = once(turns)
    slow, quick = Client(door), Client(door)
    await quick.has(parts[0])
    slow.reads.clear()
    turns.goes_on.set()
    await asyncio.sleep(0.05)
    # The engine is held up, as by a slow client without a key.
    (turn,) = door._running.values()
    assert turn._size < 25_000
    with pytest.raises(ApiError, match="too long to be given again"):
        await Client(door).answered()
    slow.reads.set()
    for client in (slow, quick):
        assert (await client.answered())[1] == b"".join(parts)
    with pytest.raises(ApiError, match="another key"):
        await Client(door).answered()
    assert len(turns.bodies) == 1


async def test_a_body_that_is_refused_is_refused_as_without_a_key() -> None:
    door = FrontDoor(Settings(max_body_bytes=1024), Observed(), "router")
    headers = [(b"content-type", b"application/json"), (b"content-length", b"99999999")]
    answers = [
        await Client(door, headers=[*headers, *key]).answered()
        for key in ([], [(b"idempotency-key", b"k")])
    ]
    assert answers[0] == answers[1]
    assert answers[0][0] == 413


class Observed(StubTable):
    """A table that is told of refused turns."""

    def tell(self, method: str, *given: Any) -> None:
        assert method == "observe"
