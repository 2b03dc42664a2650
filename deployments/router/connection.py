"""A client's connection to the router, whose client may have closed its own side of it.

A client that has nothing more to send may say so (``shutdown(SHUT_WR)``) and wait for its answer.
uvicorn takes that for a client that has left (https://github.com/Kludex/uvicorn/issues/1264), and
so do turns, which end then. To TCP both look alike, until something is sent: who has left
altogether resets the connection, and who waits reads on. So that is what is done, with bytes that
mean nothing to a client of HTTP/1.1.

Internals of uvicorn 0.54 that are used: ``HttpToolsProtocol``'s ``cycle``, ``pipeline``,
``transport`` and ``on_response_complete``.
"""

import asyncio
import select

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

# A client may get any number of these that it has not asked for, and passes them over
# (https://www.rfc-editor.org/rfc/rfc9110#section-15.2).
_BEFORE_THE_ANSWER = b"HTTP/1.1 100 Continue\r\n\r\n"
# A chunk's size may begin with zeros (https://www.rfc-editor.org/rfc/rfc9112#section-7.1), and the
# last one's may have several; the size itself follows with the next part of the stream.
_BETWEEN_CHUNKS = b"0"
# The event loop reads no more of a connection after its end, and would see a reset at the next
# write.
_LOOK_S = 0.1


class Connection(HttpToolsProtocol):
    """uvicorn's connection, kept after its client's last byte until what was asked is answered."""

    _ended = False
    _looking: asyncio.TimerHandle | None = None

    def eof_received(self) -> bool:  # type: ignore[override]  # None would close, as uvicorn does.
        """Say whether the connection is kept: where a whole request is still unanswered."""
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body:
            return False
        # Older clients would take the first bytes for the answer.
        if cycle.scope["http_version"] == "1.0":
            return False
        self._ended = True
        # Of several requests the one that is being answered is not known, nor what may be sent.
        if not self.pipeline:
            if not cycle.response_started:
                self.transport.write(_BEFORE_THE_ANSWER)
            elif cycle.chunked_encoding:
                self.transport.write(_BETWEEN_CHUNKS)
        self._look_again()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the application that its client has left, as uvicorn does."""
        if self._looking is not None:
            self._looking.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Go on to the next request, or close after the last one."""
        super().on_response_complete()
        if self._ended and self.cycle.response_complete:
            self.transport.close()

    def _look_again(self) -> None:
        self._looking = self.loop.call_later(_LOOK_S, self._look)

    def _look(self) -> None:
        if self.transport.is_closing():
            return
        watched = select.poll()
        watched.register(self.transport.get_extra_info("socket").fileno(), 0)
        # Errors and resets are reported unasked, and of the others none.
        if watched.poll(0):
            self.transport.abort()
        else:
            self._look_again()
