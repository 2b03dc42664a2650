"""Calls engines over HTTP.

What a client has of a stream is recorded, so that another decoder can go on with it.
"""

import asyncio
import contextlib
import io
import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import ContextVar
from typing import Any, Literal

import aiohttp
import msgspec

from conserve import apis, wire
from conserve.errors import ApiError, from_engine
from conserve.turn import TurnStats
from deployments.messages import Checked

_CONNECT_TIMEOUT_S = 5.0
_HEALTH_TIMEOUT_S = 5.0
# vLLM may print the whole request in a refusal.
_LONGEST_ERROR_BYTES = 64 * 1024 * 1024
_LONG_BYTES = 256 * 1024


# What makes an engine's spans part of the current turn's trace; None: it is not traced.
TRACE_HEADERS: ContextVar[Mapping[str, str] | None] = ContextVar("trace_headers", default=None)


class EngineUnreachable(Exception):
    """The connection to an engine could not be made, or broke.

    Attributes:
        had_request: whether the engine may have worked on the request.
    """

    def __init__(self, why: str, *, had_request: bool = True) -> None:
        super().__init__(why)
        self.had_request = had_request


class Upstream:
    """HTTP to engines; connections are kept, and not limited in number.

    Its methods raise `ApiError` where the engine refuses, and `EngineUnreachable` where another
    engine has to be tried.

    Args:
        silence_s: the longest silence of an engine within a response.
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._session: aiohttp.ClientSession | None = None

    async def check(self, url: str, path: str, raw: bytes) -> Checked:
        """Have an engine judge a turn without serving it, and tokenize its prompts."""
        headers = {"Content-Type": "application/json"}
        async with self.post(url + wire.CHECK_PREFIX + path, raw, headers) as response:
            if response.status == 404:
                raise ApiError(
                    502,
                    "the engine cannot check requests; run the same version of ConServe on all "
                    "nodes",
                    "engine_error",
                )
            if response.status != 200:
                raise await engine_error(response)
            return msgspec.json.decode(await response.read(), type=Checked)

    async def prefill(self, url: str, path: str, raw: bytes) -> TurnStats:
        """Have the KV of a turn's prompt computed and stored; nothing is generated."""
        answer = await self.answered(url + wire.PREFILL_PREFIX + path, raw)
        return msgspec.json.decode(answer, type=TurnStats)

    async def leave(self, url: str, reader: wire.Reader) -> None:
        """Tell a decoder that this router reads an answer no more; it ends then."""
        with contextlib.suppress(EngineUnreachable, ApiError):
            await self.answered(url + wire.LEAVE_PATH, msgspec.json.encode(reader))

    async def answered(self, url: str, raw: bytes) -> bytes:
        """Return an engine's answer to a request that is no turn, as JSON."""
        async with self.post(url, raw, {"Content-Type": "application/json"}) as response:
            if response.status not in (200, 204):
                raise await engine_error(response)
            return await response.read()

    async def stored(
        self, method: Literal["GET", "DELETE"], url: str, response_id: str, tenant: str | None
    ) -> bytes | None:
        """Return what a decoder keeps of a response, or delete it; None if there is no such one.

        Args:
            response_id: letters, digits, ``_`` and ``-``.
        """
        headers = {} if tenant is None else {wire.TENANT_HEADER: tenant}
        path = wire.STORED_PREFIX + response_id
        async with self._exchange(method, url + path, headers=headers) as response:
            if response.status == 404:
                return None
            if response.status not in (200, 204):
                raise await engine_error(response)
            # It may have a whole history's images.
            parts = [part async for part in response.content.iter_any()]
            return await asyncio.to_thread(b"".join, parts)

    async def described(self, url: str) -> dict[str, Any]:
        """Return an engine's OpenAPI document, of the paths that routers ask for."""
        async with self._exchange("GET", url + "/openapi.json") as response:
            if response.status != 200:
                raise ApiError(
                    503,
                    "the engines do not describe their paths (`disable_fastapi_docs`?)",
                    "unavailable",
                    retry_after_s=60,
                )
            document: dict[str, Any] = await response.json()
            return document

    async def healthy(self, url: str) -> bool:
        try:
            timeout = aiohttp.ClientTimeout(total=_HEALTH_TIMEOUT_S)
            async with self._open().get(url + "/health", timeout=timeout) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    def post(
        self, url: str, raw: bytes, headers: dict[str, str]
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Send a turn; the response's body is yet to be read, which may fail in the same ways."""
        return self._exchange("POST", url, raw, headers)

    @asynccontextmanager
    async def _exchange(
        self, method: str, url: str, raw: bytes | None = None, headers: dict[str, str] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        if (traced := TRACE_HEADERS.get()) is not None:
            headers = {**(headers or {}), **traced}
        # A long one is sent in pieces, between which other turns' tokens are passed on.
        data = raw if raw is None or len(raw) <= _LONG_BYTES else io.BytesIO(raw)
        try:
            async with self._open().request(method, url, data=data, headers=headers) as response:
                yield response
        except aiohttp.ConnectionTimeoutError as error:
            raise EngineUnreachable(
                f"no connection within {_CONNECT_TIMEOUT_S:g} s", had_request=False
            ) from error
        except aiohttp.ServerTimeoutError as error:
            raise ApiError(
                504,
                f"the engine was silent for {self._silence_s:g} s; the turn was given up",
                "timeout",
            ) from error
        except aiohttp.ClientError as error:
            made = not isinstance(error, aiohttp.ClientConnectorError)
            raise EngineUnreachable(f"{type(error).__name__}: {error}", had_request=made) from error

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30),
                timeout=aiohttp.ClientTimeout(
                    total=None, sock_connect=_CONNECT_TIMEOUT_S, sock_read=self._silence_s
                ),
                auto_decompress=False,
                read_bufsize=256 * 1024,
            )
        return self._session


async def engine_error(response: aiohttp.ClientResponse) -> ApiError:
    """Read an engine's refusal to its end, or to the longest that an error may be."""
    raw = bytearray()
    async for part in response.content.iter_any():
        raw += part
        if len(raw) > _LONGEST_ERROR_BYTES:
            break
    try:
        body = json.loads(raw)
    except ValueError:
        body = None
    return from_engine(response.status, body)


def error_of_event(event: bytes) -> ApiError | None:
    """Read a refusal that an engine has put into a stream's event, as on OpenAI's older paths.

    Args:
        event: with its ``data:``; other APIs' events name no status, and give None.
    """
    try:
        body = json.loads(event.removeprefix(b"data: "))
        status = body["error"]["code"]
    except (ValueError, LookupError, TypeError):
        return None
    return from_engine(status, body) if isinstance(status, int) else None


END_OF_EVENT = b"\n\n"
_ID = re.compile(rb'"id":"(?:chatcmpl-|cmpl-|msg_)([^"\\]{1,200})"')
_CREATED = re.compile(rb'"created(?:_at)?":\d+')
# The first event of Messages and the last but one say what was found in caches. A decoder that goes
# on with a stream has found something else, which is not told.
_SAYS_USAGE = b"event: message_delta\n"
# Comments and pings of the engine's; the router has its own.
_KEEPS_ALIVE = (b":", b"event: ping\n")
_COUNTED_ONCE = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
# vLLM's own event tells of the classes in which it has failed to read another one.
_FAILED = from_engine(500, None)


class StreamRecord:
    """Passes a stream's events on, and keeps the notes that come beside them (`wire.note`).

    An event is passed on once it is whole, since another decoder could not complete half of one.
    When a stream begins anew elsewhere (`resume`), the events that were passed on are left out.

    Attributes:
        notes: of all events passed on, as they came.
        request_id: vLLM's, as events name it; None before the first.
        error: the event by which the engine ended the stream, which was not passed on.
        failed: whether an error by which the engine ended it was passed on.
        done: whether the stream came to its end.
        stats: its decoder's record of the turn, which comes with the end.
        continues: whether another decoder may go on with it.
    """

    def __init__(self, path: str = apis.CHAT, *, continues: bool = True) -> None:
        self.continues = continues
        self.stats: TurnStats | None = None
        self.notes = bytearray()
        self.request_id: str | None = None
        self.error: bytes | None = None
        self.failed = False
        self.done = False
        self._path = path
        self._form = apis.form_of(path)
        self._rest = self._note = b""
        self._passed = 0
        # How many of the passed events came before anything was generated.
        self._opened = 0
        self._skip = 0
        self._created: bytes | None = None
        # The first event of Messages, which a later decoder's usage has to agree with.
        self._start: bytes | None = None
        self._resumed = False

    @property
    def can_resume(self) -> bool:
        """Whether the client has something, and it is known what."""
        return self.continues and (bool(self.notes) or 0 < self._passed == self._opened)

    def resume(self) -> None:
        """Note that the stream begins anew, at another decoder."""
        self._skip = self._passed
        self._resumed = self._passed > 0
        self._rest, self._note, self.error = b"", b"", None

    def take(self, part: bytes) -> bytes:
        """Return the events that the next bytes complete, for the client."""
        *events, self._rest = (self._rest + part).split(END_OF_EVENT)
        return b"".join(passed for event in events if (passed := self._take_event(event)))

    def _take_event(self, event: bytes) -> bytes:
        if self.error is not None:
            return b""  # vLLM puts its end behind it.
        note, self._note = self._note, b""
        if event.startswith(wire.SUMMARY_MARK):
            told, _, event = event.partition(b"\n")
            self.stats = wire.read_summary(told.removeprefix(wire.NOTE_MARK))
        elif event.startswith(wire.NOTE_MARK + b"["):
            noted, _, event = event.partition(b"\n")
            note += noted + b"\n"
        if event.startswith(_KEEPS_ALIVE):
            self._note = note  # These outputs are in the next event.
            return b""
        if event.startswith(self._form.error):
            if self._path == apis.MESSAGES:
                event = _FAILED.event(self._path).removesuffix(END_OF_EVENT)
            # Where the stream can neither go on nor begin anew, the client gets the error.
            if self.can_resume or not self._passed:
                self.error = event + END_OF_EVENT
                return b""
            self.failed = True
        self.done = event.startswith(self._form.ends)
        if self._skip:
            self._skip -= 1
            return b""
        if not self._passed:
            self._read_first(event)
        elif self._created is not None and event.startswith(
            (b"data: {", *self._form.opens, *self._form.ends)
        ):
            # It stays one answer, though another engine has begun later.
            event = _CREATED.sub(self._created, event, count=1)
        elif self._resumed and self._start is not None and event.startswith(_SAYS_USAGE):
            event = _with_usage(event, self._start)
        self.notes += note
        if event.startswith(self._form.opens):
            self._opened += 1
        self._passed += 1
        return event + END_OF_EVENT

    def _read_first(self, event: bytes) -> None:
        if found := _ID.search(event):
            self.request_id = found[1].decode(errors="replace")
        if found := _CREATED.search(event):
            self._created = found[0]
        if self._path == apis.MESSAGES:
            self._start = event


def _with_usage(event: bytes, start: bytes) -> bytes:
    """Return an event of Messages with the prompt's usage from the stream's first event."""
    name, mark, data = event.partition(b"data: ")
    told = json.loads(data)
    said = json.loads(start.partition(mark)[2])["message"]["usage"]
    usage = {name: tokens for name, tokens in told["usage"].items() if name not in _COUNTED_ONCE}
    told["usage"] = {name: said[name] for name in _COUNTED_ONCE if name in said} | usage
    return name + mark + json.dumps(told, separators=(",", ":")).encode()
