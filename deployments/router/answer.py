"""Passes an engine's answer on to the client: bytes, as they come, unread."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import aiohttp
from starlette.types import Send

from conserve import wire
from conserve.apis import form_of, is_dialogue
from conserve.errors import ApiError
from conserve.turn import TurnStats
from deployments.router.errors import RawHeaders, refuse
from deployments.router.upstream import StreamRecord

# Proxies close a connection that is silent for a while: nginx and AWS's load balancers after 60 s.
_SILENCE_S = 15.0
_OF_STREAMS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
]


class AnsweredWithError(Exception):
    """The engine ended its stream with an error, which the client has."""


class StreamBroken(Exception):
    """A stream has ended too soon that can be continued, or of which the client has nothing.

    Attributes:
        event: the error by which the engine ended it, if it did; the client does not have it.
    """

    def __init__(self, event: bytes | None) -> None:
        super().__init__("the engine ended the stream with an error" if event else "cut off")
        self.event = event


class RelayedAnswer:
    """Relays a turn's answer, and measures what can be seen in passing.

    Args:
        arrived_s: when the request came, by `time.perf_counter`.
        record: keeps what the client gets of a stream, for another engine to go on with; None for
            an answer in one piece.

    Attributes:
        begun: whether a stream's status is sent, so that an error can only be an event.
        started: whether the client has some of it, so that it cannot be given anew.
        ttft_s: time from the request to a stream's first event with output; None: none came.
        tbt_s: gaps between a stream's events that hold output.
        first_s: when this engine's first output came, by `time.perf_counter`; None: none came, or
            the answer is in one piece.
        stats: this engine's record of the turn; None until its end.
        effective: whether it is a dialogue's, is complete and holds no tool call.
    """

    def __init__(
        self, path: str, arrived_s: float, send: Send, record: StreamRecord | None = None
    ) -> None:
        self._path = path
        self._form = form_of(path)
        self._events = 0
        self._arrived_s = arrived_s
        self._send = send
        self.record = record
        self.begun = False
        self.started = False
        self.ttft_s: float | None = None
        self.tbt_s: list[float] = []
        self.first_s: float | None = None
        self.stats: TurnStats | None = None
        self.effective = False
        self._calls_tool = False
        # A stream is written to by its relay, and by `wait`.
        self._writing = asyncio.Lock()
        self._wrote_s = 0.0
        self._ended = False

    async def wait(
        self, ends: set["asyncio.Future[Any]"], own_headers: Callable[[], RawHeaders]
    ) -> None:
        """Wait until one of ``ends`` is done; meanwhile a stream is never silent for long.

        Nothing is sent of a stream within its first `_SILENCE_S`, so most refusals have their own
        status. Then it begins, with a comment.
        """
        loop = asyncio.get_running_loop()
        self._wrote_s = loop.time()
        left_s = None if self.record is None else _SILENCE_S
        while not (await asyncio.wait(ends, timeout=left_s, return_when="FIRST_COMPLETED"))[0]:
            left_s = self._wrote_s + _SILENCE_S - loop.time()
            if left_s <= 0:
                left_s = _SILENCE_S
                # A write that is not over waits for the client to read.
                if not self._ended and not self._writing.locked():
                    await self._write(self._form.keep_alive, own_headers())

    def forget_engine(self) -> None:
        """Note that another engine is asked."""
        self.first_s = self.stats = None

    async def relay(self, response: aiohttp.ClientResponse, own_headers: RawHeaders) -> None:
        """Pass a response on to its end.

        Raises:
            AnsweredWithError: the engine could not go on, and has told the client.
            StreamBroken: it could not, and another one can; the client has not been told.
        """
        if response.content_type == "text/event-stream":
            await self._relay_stream(response, own_headers)
            return
        # It is read whole before the first byte is sent, so that another engine can serve the turn
        # if this one dies.
        whole = await response.read()
        if (said := response.headers.get(wire.SUMMARY_HEADER)) is not None:
            self.stats = wire.read_summary(said)
        self.effective = is_dialogue(self._path) and self._form.tool_call not in whole
        self.started = True
        length = (b"content-length", str(len(whole)).encode())
        kind = (b"content-type", response.headers.get("Content-Type", "").encode())
        headers = [*own_headers, kind, length]
        start = {"type": "http.response.start", "status": response.status, "headers": headers}
        await self._send(start)
        await self._send({"type": "http.response.body", "body": whole})

    async def _relay_stream(
        self, response: aiohttp.ClientResponse, own_headers: RawHeaders
    ) -> None:
        last_s = 0.0
        record, form = self.record, self._form
        assert record is not None
        record.resume()
        async for came in response.content.iter_any():
            part = record.take(came)
            if record.error is not None:
                break
            if not part:
                continue
            now_s = time.perf_counter()
            self.started = True
            self._events += part.count(b"\n\n")
            if self.first_s is None:
                if form.shows_output(part):
                    self.first_s = last_s = now_s
                    if self.ttft_s is None:
                        self.ttft_s = now_s - self._arrived_s
            elif outputs := form.outputs_in(part):
                if last_s:
                    self.tbt_s += [(now_s - last_s) / outputs] * outputs
                last_s = now_s
            self._calls_tool = self._calls_tool or form.tool_call in part
            await self._write(part, own_headers)
        self.stats = record.stats
        goes_on = record.can_resume or not self.started
        if not record.done and (goes_on or record.error):
            raise StreamBroken(record.error)
        await self._write(b"", own_headers, more=False)
        # Nothing may be awaited after that: the server takes the exchange for over, and the turn
        # would count as one whose client has left.
        if record.failed:
            raise AnsweredWithError
        self.effective = is_dialogue(self._path) and not self._calls_tool

    async def end_with_event(self, event: bytes, own_headers: RawHeaders) -> None:
        """End a stream with the engine's own last event."""
        await self._write(event, own_headers, more=False)

    async def _write(self, part: bytes, own_headers: RawHeaders, *, more: bool = True) -> None:
        """Send whole events of a stream, the first ones behind its headers."""
        async with self._writing:
            if not self.begun:
                self.begun = True
                headers = [*own_headers, *_OF_STREAMS]
                await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            self._ended = not more
            await self._send({"type": "http.response.body", "body": part, "more_body": more})
            self._wrote_s = asyncio.get_running_loop().time()

    async def end_with(self, error: ApiError, own_headers: RawHeaders) -> None:
        """End with an error: as the response, or where that has begun, as its last event."""
        if self.begun:
            await self.end_with_event(error.event(self._path, self._events), own_headers)
        elif not self.started:
            await refuse(error, own_headers, self._send, self._path)
        else:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
