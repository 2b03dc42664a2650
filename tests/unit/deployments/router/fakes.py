"""Stand-ins for the table and for engines, and a router's turns between both."""

import asyncio
import contextlib
import inspect
import json
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from conserve import wire
from conserve.errors import ApiError
from conserve.settings import Settings, load
from conserve.tenants import KeyFile, Limits, Tenant, keyfile
from conserve.turn import TurnKey, TurnStats
from conserve.wire import Emitted, Reader
from deployments.messages import BeginTurn, Checked, CountingEngine, TurnPlan, Uncounted
from deployments.router.access import Access
from deployments.router.frontdoor import FrontDoor
from deployments.router.turn import TurnEndpoint
from deployments.router.upstream import EngineUnreachable
from deployments.table_client import TableClient
from tests.unit.deployments import asgi
from tests.unit.deployments.stub_table import StubTable

PROMPT = {"messages": [{"role": "user", "content": "hello"}]}
STREAMED = {**PROMPT, "stream": True}
ANSWER = ["one ", "two ", "three ", "four"]


class Keys:
    """A key file with a key of `acme`, which may have limits, and an admin's of `ops`."""

    def __init__(self, folder: Path, limits: Limits | None = None) -> None:
        content, self.acme = KeyFile.new().with_key("acme", "2026-01-31")
        if limits is not None:
            content = content.with_tenant("acme", Tenant(limits))
        self.content, self.ops = content.with_key("ops", "2026-01-31", admin=True)
        self.path = folder / "keys.json"
        keyfile.write(self.path, self.content)

    @property
    def settings(self) -> Settings:
        return Settings(host="0.0.0.0", keys_file=str(self.path))

    def of(self, who: str | None) -> dict[str, str]:
        """Return the headers of `acme`, `ops`, or of another with a key that is none."""
        return {} if who is None else bearer(getattr(self, who, "csk-nobody"))

    @property
    def of_acme(self) -> dict[str, Any]:
        """What makes a turn of `exchange` one of `acme`."""
        return {"access": Access(self.settings), "headers": bearer(self.acme)}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


TOKENIZER = CountingEngine("tokenizer", "http://tokenizer", 1000)


@dataclass
class FakeTable(StubTable):
    """Binds each turn to the next decoder, with a prefiller of its own if there are any.

    Attributes:
        prefillers: the first turns have one.
        plan: changes of each plan.
        later: the plan of a counted turn that is not the first one.
        answers: makes of this table what is answered instead, by method; None: as always.
        asked: methods, in order.
        begun, placed: what `begin` was given, and of that what it has placed.
        lost: engines that were reported.
    """

    prefillers: int = 0
    id: str = "c"
    plan: dict[str, Any] = field(default_factory=dict)
    later: TurnPlan | None = None
    answers: dict[str, Any] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    begun: list[BeginTurn] = field(default_factory=list)
    placed: list[BeginTurn] = field(default_factory=list)
    told: list[tuple[str, Any]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    async def call(self, method: str, *given: Any) -> Any:
        self.asked.append(method)
        instead = self.answers.get(method, lambda _: None)(self)
        if inspect.isawaitable(instead):
            instead = await instead
        if instead is not None:
            return instead
        if method == "begin":
            self.begun.append(given[0])
            if given[0].prompt_tokens is None:
                return Uncounted(self.id, TOKENIZER)
            if self.later is not None and self.placed:
                return self.later
            self.placed.append(given[0])
            turn = len(self.placed)
            prefiller = f"p{turn}" if turn <= self.prefillers else None
            url = None if prefiller is None else f"http://{prefiller}"
            key = TurnKey(self.id, 1, turn)
            plan = TurnPlan(key, f"d{turn}", f"http://d{turn}", prefiller, url)
            return replace(plan, **self.plan)
        assert method == "engine_lost"
        self.lost.append(given[0])
        return None

    def tell(self, method: str, *given: Any) -> None:
        self.told.append((method, given[-1] if method == "observe" else given[0]))

    def told_of(self, method: str) -> list[Any]:
        return [given for name, given in self.told if name == method]


def told_by(headers: dict[str, str]) -> wire.DecoderTurn:
    """Read what a decoder is told of a turn."""
    return wire.DecoderTurn.read(headers[wire.TURN_HEADER])


class Whole:
    """An engine's answer in one piece."""

    content_type = "application/json"
    raw_headers = ((b"Content-Type", b"application/json"),)

    def __init__(
        self,
        summary: TurnStats | None = None,
        status: int = 200,
        headers: dict[str, str] | None = None,
    ) -> None:
        said = {} if summary is None else {wire.SUMMARY_HEADER: msgspec.json.encode(summary)}
        self.status = status
        self.headers = headers or {name: value.decode() for name, value in said.items()}

    async def read(self) -> bytes:
        return b'{"choices": []}'


@dataclass
class Stream:
    """A decoder's answer, that breaks off after so many events; numbers are seconds of silence."""

    events: Sequence[bytes | int]
    breaks: Exception | None = None
    status = 200
    content_type = "text/event-stream"
    raw_headers = ((b"Content-Type", b"text/event-stream"),)

    @property
    def content(self) -> "Stream":
        return self

    async def iter_any(self) -> AsyncIterator[bytes]:
        for event in self.events:
            if isinstance(event, int):
                await asyncio.sleep(event)
            else:
                yield event
        if self.breaks is not None:
            raise self.breaks


@dataclass
class FakeEngines:
    """Engines by their URL's host, in the place of `Upstream`; streams are `ANSWER`.

    Attributes:
        die: those that are gone once they have the prompt.
        gone: those that were gone before.
        live: whether all of them are there all the same.
        checked: what a check answers, or raises.
        prefilled: what a prefill answers, after ``prefill_s``.
        summary: what decoders tell of a turn at its end.
        after: how many events a decoder puts out before it dies.
        last_words: what it puts out then.
        notes: whether decoders say what is in an event.
        scripts: the parts of streams, each of another decoder; one whose last part is silence is
            lost then.
        straight_will: what becomes of a turn that comes straight: serve, refuse, or die.
        served: which engines worked.
        counted: which engines have counted a prompt.
        asked: what they were asked to do, and by which paths.
        got: headers and bodies of prefills and turns.
        posted: bodies as they came, and headers of turns.
        left: answers that routers read no more.
        forgot: called where a turn should rejoin an answer, and none is there.
        straight: what those were told that were sent a turn straight.
    """

    die: Collection[str] = ()
    gone: Collection[str] = ()
    live: bool = False
    checked: Checked | ApiError = field(default_factory=lambda: Checked([[1, 2, 3]], False, 0))
    prefilled: TurnStats = field(default_factory=lambda: TurnStats(prefilled_tokens=3))
    prefill_s: float = 0.0
    summary: TurnStats | None = None
    after: dict[str, int] = field(default_factory=dict)
    last_words: bytes = b""
    notes: bool = True
    scripts: list[list[bytes | int]] = field(default_factory=list)
    straight_will: str = "serve"
    dead: set[str] = field(default_factory=set)
    served: list[str] = field(default_factory=list)
    counted: list[str] = field(default_factory=list)
    asked: list[tuple[str, str]] = field(default_factory=list)
    got: list[tuple[dict[str, str], Any]] = field(default_factory=list)
    posted: list[tuple[bytes, dict[str, str]]] = field(default_factory=list)
    left: list[tuple[str, Reader]] = field(default_factory=list)
    forgot: Callable[[], None] | None = None
    straight: list[wire.DecoderTurn] = field(default_factory=list)

    def _serve(self, url: str) -> str:
        name = url.removeprefix("http://").partition("/")[0]
        if name in self.gone:
            self.dead.add(name)
            raise EngineUnreachable(f"cannot connect to {name}", had_request=False)
        self.served.append(name)
        if name in self.die:
            self.dead.add(name)
            raise EngineUnreachable(f"{name} is gone")
        return name

    async def check(self, url: str, path: str, raw: bytes) -> Checked:
        self.counted.append(url)
        self.asked.append(("check", path))
        if url.removeprefix("http://") in self.die:
            self._serve(url)
        if isinstance(self.checked, ApiError):
            raise self.checked
        return self.checked

    async def prefill(self, url: str, path: str, raw: bytes) -> TurnStats:
        self._serve(url)
        self.asked.append(("prefill", path))
        self.got.append(({}, json.loads(raw)))
        await asyncio.sleep(self.prefill_s)
        # Its caller adds to it.
        return msgspec.structs.replace(self.prefilled)

    async def leave(self, url: str, reader: Reader) -> None:
        self.left.append((url, reader))

    async def healthy(self, url: str) -> bool:
        return self.live or url.removeprefix("http://") not in self.dead

    @contextlib.asynccontextmanager
    async def post(
        self, url: str, raw: bytes, headers: dict[str, str]
    ) -> AsyncIterator[Whole | Stream]:
        told = told_by(headers)
        if told.straight is not None:
            self.straight.append(told)
            yield self._straight_answer(url)
            return
        name = self._serve(url)
        self.posted.append((raw, headers))
        if told.rejoins and self.forgot is not None:
            self.forgot()
            yield Whole(None, wire.REFUSED_STATUS, {wire.REFUSED_HEADER: "1"})
            return
        self.asked.append(("post", "/v1" + url.partition("/v1")[2]))
        # What a decoder goes on with stands before the body.
        body = json.loads(raw[told.sent_bytes :])
        self.got.append((headers, body))
        if self.scripts:
            parts = self.scripts.pop(0)
            if isinstance(parts[-1], int):
                self.dead.add(name)
                yield Stream(parts, EngineUnreachable("gone"))
            else:
                yield Stream(parts)
                # It takes a while to give the connection back.
                await asyncio.sleep(40)
        elif body.get("stream"):
            yield self._stream(name, told)
        else:
            yield Whole(self.summary)

    def _straight_answer(self, url: str) -> Whole:
        if self.straight_will == "die":
            self.dead.add(url.removeprefix("http://").partition("/")[0])
            raise EngineUnreachable("gone")
        if self.straight_will == "refuse":
            return Whole(None, wire.REFUSED_STATUS, {wire.REFUSED_HEADER: "1"})
        return Whole(None, 200, {wire.TURN_HEADER: wire.header_value(TurnKey("c", 1, 257))})

    def _stream(self, name: str, told: wire.DecoderTurn) -> Stream:
        noted, created = self.notes and told.notes, len(self.posted)
        answer = [noted_event(*one, created, noted) for one in enumerate(ANSWER)]
        if name not in self.after:
            end = b"" if self.summary is None else wire.note(self.summary)
            return Stream([*answer, end + b"data: [DONE]\n\n"])
        answer = answer[: self.after[name]]
        self.dead.add(name)
        if self.last_words:
            return Stream([*answer, self.last_words])
        return Stream(answer, EngineUnreachable(f"{name} is gone"))


def noted_event(number: int, text: str, created: int, noted: bool) -> bytes:
    """Return an event of a chat's stream, with a note of its token if it is ``noted``."""
    chunk = {"id": "chatcmpl-x", "created": created, "choices": [{"delta": {"content": text}}]}
    event = b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"
    return wire.note([Emitted([number])]) + event if noted else event


def endpoint_of(table: FakeTable, engines: FakeEngines, **settings: Any) -> TurnEndpoint:
    """Return a router's endpoint of turns between these."""
    endpoint = asgi.turn_endpoint(load(settings), table, engines, "router")
    endpoint.counters.append(TOKENIZER)
    return endpoint


def exchange(
    to: TurnEndpoint | tuple[FakeTable, FakeEngines],
    body: Any = PROMPT,
    path: str = "/v1/chat/completions",
    headers: dict[str, str] | None = None,
    access: Access | None = None,
    run: Callable[[Any], Any] = asyncio.run,
    **settings: Any,
) -> list[dict[str, Any]]:
    """Return all that is sent in answer to one turn."""
    endpoint = to if isinstance(to, TurnEndpoint) else endpoint_of(*to, **settings)

    async def admitted(scope: Any, receive: Any, send: Any) -> None:
        if access is not None:
            access.admit(scope)
        await endpoint(scope, receive, send)

    sent: list[dict[str, Any]] = []

    async def collect() -> None:
        sent.extend(await asgi.exchanged(admitted, body, path=path, headers=headers))

    run(collect())
    return sent


def ask(*given: Any, **more: Any) -> tuple[int, dict[str, str], Any]:
    """Return status, headers and JSON of the answer to one turn, as `exchange` takes it."""
    status, headers, body = asgi.told(exchange(*given, **more))
    return status, headers, json.loads(body)


@contextlib.asynccontextmanager
async def answering(answer: bytes, asked: list[bytes] | None = None) -> AsyncIterator[str]:
    """Be an engine that answers each request so, and closes; gives its URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"{}")
        if asked is not None:
            asked.append(request)
        writer.write(answer)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def a_door(table: TableClient | None = None, settings: Settings | None = None) -> FrontDoor:
    """Return a router's application; without a table, none is asked."""
    return FrontDoor(settings or Settings(), table or StubTable(), "router")
