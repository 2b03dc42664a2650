"""Serves one turn for all requests with one `Idempotency-Key`.

A client whose connection broke may send its request again without the turn being computed, and
counted, twice. The turn runs beside its clients' connections. Each of them gets the whole answer:
what there is of it at once, and the rest as it comes.

Keys are a tenant's, and a path's. They hold within one router: the answer's bytes are here, and the
conversation table, which all routers share, has none. Nothing is stored of an error, so that the
request can be tried again.
"""

import asyncio
import functools
import hashlib
import time
from collections.abc import Callable
from typing import NamedTuple

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from conserve.apis import form_of
from conserve.errors import ApiError
from conserve.settings import Settings
from deployments.router.access import tenant_of
from deployments.router.guard import with_headers
from deployments.router.reading import disconnected, most_bytes, read_body

HEADER = "idempotency-key"
MOST_CHARS = 255
# For how long an answer is kept, and how much of all answers.
_KEPT_S = 600.0
_KEPT_BYTES = 64 * 1024 * 1024
# A longer answer reaches the clients that wait for it, and is not kept.
_ANSWER_BYTES = 16 * 1024 * 1024
# Python's own, of an answer and of a part of a stream.
_TURN_BYTES, _PART_BYTES = 2048, 512
# A turn that no client waits for any more goes on for so long, for a client that tries again.
_ALONE_S = 10.0
_SHORT_BYTES = 256 * 1024
_REPEATED = [(b"idempotent-replayed", b"true")]


class _Id(NamedTuple):
    """A turn's name."""

    tenant: str | None
    path: str
    key: str


class Idempotency:
    """The ASGI endpoint of turns that may have a key, before the one that serves them.

    Args:
        app: serves turns.
        now_s: the monotonic clock.
    """

    def __init__(
        self, app: ASGIApp, settings: Settings, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._app = app
        self._settings = settings
        self._now_s = now_s
        self._running: dict[_Id, _Turn] = {}
        # Those that ended first come first.
        self._kept: dict[_Id, _Turn] = {}
        self._kept_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or give it the answer of the turn that has its key.

        Raises:
            ApiError: the key is not usable, or was another request's.
        """
        headers = Headers(scope=scope)
        key = headers.get(HEADER)
        if not key:
            await self._app(scope, receive, send)
            return
        _require_usable(key)
        try:
            raw = await read_body(headers, receive, most_bytes(self._settings))
        except ClientDisconnect:
            return
        except ApiError as error:
            # It is refused as without a key.
            await self._app(scope, _raising(error), send)
            return
        digest = await _digest(raw)
        id_ = _Id(tenant_of(scope), scope["path"], key)
        self._forget()
        turn = self._running.get(id_) or self._kept.get(id_)
        if turn is not None and not turn.given_up:
            turn.require_repeatable(digest)
            await turn.follow(receive, with_headers(_REPEATED, send))
            return
        turn = self._running[id_] = _Turn(digest)
        turn.serve(self._app, scope, raw, functools.partial(self._ended, id_, turn))
        await turn.follow(receive, send)

    def _ended(self, id_: _Id, turn: "_Turn") -> None:
        if self._running.get(id_) is turn:
            del self._running[id_]
        if turn.kept_bytes:
            turn.ended_s = self._now_s()
            self._kept[id_] = turn
            self._kept_bytes += turn.kept_bytes
            self._forget()

    def _forget(self) -> None:
        """Forget answers that are too old, and the oldest of too many."""
        oldest_s = self._now_s() - _KEPT_S
        while self._kept:
            id_, turn = next(iter(self._kept.items()))
            if turn.ended_s > oldest_s and self._kept_bytes <= _KEPT_BYTES:
                break
            del self._kept[id_]
            self._kept_bytes -= turn.kept_bytes


class _Turn:
    """One turn, the parts of its answer, and the clients that get them.

    Attributes:
        given_up: whether it is cancelled, since no client waits for it.
        kept_bytes: the answer's, once it has ended; 0: it is not worth keeping.
        ended_s: when it ended, by the monotonic clock.
    """

    def __init__(self, digest: bytes) -> None:
        self._digest = digest
        self.kept_bytes = 0
        self.ended_s = 0.0

        # The answer: its parts, without the first `_dropped` of them, and their bytes.
        self._parts: list[Message] = []
        self._dropped = 0
        self._size = 0
        self._too_long = False
        self._failure: Exception | None = None
        self._over = False

        # Its clients, by the number of parts that each has.
        self._clients: dict[object, int] = {}
        self._changed = asyncio.Event()
        self._given_up = asyncio.Event()
        self._giving_up: asyncio.TimerHandle | None = None

    @property
    def given_up(self) -> bool:
        return self._given_up.is_set()

    # --- for the turn ------------------------------------------------------------------------

    def serve(self, app: ASGIApp, scope: Scope, raw: bytes, ended: Callable[[], None]) -> None:
        """Begin the turn; ``ended`` is called at its end."""
        self._serving = asyncio.create_task(self._serve(app, scope, raw, ended))

    async def _serve(
        self, app: ASGIApp, scope: Scope, raw: bytes, ended: Callable[[], None]
    ) -> None:
        body: list[Message] = [{"type": "http.request", "body": raw, "more_body": False}]

        async def receive() -> Message:
            if body:
                return body.pop()
            await self._given_up.wait()
            return {"type": "http.disconnect"}

        try:
            await app(scope, receive, self._put)
        except Exception as error:
            self._failure = error
        finally:
            self._over = True
            self._stay()
            self._settle(scope["path"])
            self._tell()
            ended()

    async def _put(self, part: Message) -> None:
        self._parts.append(part)
        self._size += _size(part)
        self._tell()
        # The slowest client of a long answer holds up the engine, as one without a key does.
        while self._size > _ANSWER_BYTES and self._clients:
            self._too_long = True
            self._drop()
            if self._size > _ANSWER_BYTES:
                await self._changed.wait()

    def _settle(self, path: str) -> None:
        """Decide what is kept of the answer, and join its parts for clients that come later."""
        if self._too_long:
            # Only that it was given: the turn must not run for a second time.
            self.kept_bytes = _TURN_BYTES
            return
        if self._failure is not None or self.given_up or not self._parts:
            return
        begin, *rest = self._parts
        ending = b"".join(part["body"] for part in rest[-3:])
        whole = bool(rest) and not rest[-1].get("more_body", False)
        if whole and begin["status"] == 200 and form_of(path).error not in ending:
            body = b"".join(part["body"] for part in rest)
            # Clients that read the parts go on with them.
            self._parts = [begin, {"type": "http.response.body", "body": body}]
            self.kept_bytes = _TURN_BYTES + len(body)

    # --- for its clients ---------------------------------------------------------------------

    def require_repeatable(self, digest: bytes) -> None:
        """Check that a request is the turn's own, and that its answer can be given once more.

        Raises:
            ApiError: it is another request, or the answer is too long.
        """
        if digest != self._digest:
            raise ApiError(
                422,
                "this Idempotency-Key came with another body before; give each request a key of "
                "its own",
                "idempotency_key_reused",
            )
        if self._too_long:
            raise ApiError(
                409,
                "the answer to the request with this Idempotency-Key is too long to be given "
                "again; to have the turn run once more, send it with another key",
                "idempotent_answer_too_long",
            )

    async def follow(self, receive: Receive, send: Send) -> None:
        """Give one client the whole answer, until it leaves."""
        client = object()
        self._clients[client] = 0
        self._stay()
        reading = asyncio.ensure_future(self._read(client, send))
        leaving = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait({reading, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                reading.result()
        finally:
            reading.cancel()
            leaving.cancel()
            del self._clients[client]
            self._tell()
            if not self._clients and not self._over:
                loop = asyncio.get_running_loop()
                self._giving_up = loop.call_later(_ALONE_S, self._given_up.set)

    def _stay(self) -> None:
        if self._giving_up is not None:
            self._giving_up.cancel()

    async def _read(self, client: object, send: Send) -> None:
        parts = self._parts
        while True:
            while (at := self._clients[client]) < self._dropped + len(parts):
                await send(parts[at - self._dropped])
                self._clients[client] = at + 1
                if self._too_long:
                    self._drop()
                    self._tell()
            if self._over:
                break
            await self._changed.wait()
        if self._failure is not None:
            raise self._failure

    def _drop(self) -> None:
        """Drop the parts that all clients have."""
        had = min(self._clients.values()) - self._dropped
        self._size -= sum(map(_size, self._parts[:had]))
        del self._parts[:had]
        self._dropped += had

    def _tell(self) -> None:
        """Wake the turn and its clients, which wait for each other."""
        self._changed.set()
        self._changed = asyncio.Event()


def _require_usable(key: str) -> None:
    if len(key) > MOST_CHARS or not (key.isascii() and key.isprintable()):
        raise ApiError(
            400,
            f"Idempotency-Key: give at most {MOST_CHARS} characters of printable ASCII",
            "invalid_idempotency_key",
            param="Idempotency-Key",
        )


async def _digest(raw: bytes) -> bytes:
    if len(raw) <= _SHORT_BYTES:
        return hashlib.sha256(raw).digest()
    return await asyncio.to_thread(lambda: hashlib.sha256(raw).digest())


def _raising(error: ApiError) -> Receive:
    async def receive() -> Message:
        raise error

    return receive


def _size(part: Message) -> int:
    return _PART_BYTES + len(part.get("body", b""))
