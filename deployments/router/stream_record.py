"""What a client has of a stream, so that another decoder can go on with it."""

import re

from conserve import wire

# How an engine's last word in a stream begins, where it is an error.
ERROR_EVENT = b'data: {"error"'

_END = b"\n\n"
_DONE = b"data: [DONE]"
_ID = re.compile(rb'"id":"(?:chatcmpl-|cmpl-)([^"\\]{1,200})"')
_CREATED = re.compile(rb'"created":\d+')


class StreamRecord:
    """Passes a stream's events on, and keeps the notes that come beside them (`wire.note`).

    An event is passed on once it is there whole: half an event could not be completed by another
    decoder. Of a stream that goes on elsewhere, the events that were passed on before are left out:
    `resume` says that it begins anew.

    Attributes:
        notes: of all events passed on, as they came.
        request_id: under which vLLM has answered, as events name it; None before the first.
        error: the event by which the engine ended the stream, which was not passed on.
        done: whether the stream came to its end.
    """

    def __init__(self) -> None:
        self.notes = bytearray()
        self.request_id: str | None = None
        self.error: bytes | None = None
        self.done = False
        self._rest = b""
        self._passed = 0
        self._skip = 0
        self._created: bytes | None = None

    @property
    def can_resume(self) -> bool:
        """Whether it is known what the client has."""
        return bool(self.notes)

    def resume(self) -> None:
        """Note that the stream begins anew, at another decoder."""
        self._skip = self._passed
        self._rest, self.error = b"", None

    def take(self, part: bytes) -> bytes:
        """What a client is to get of the next bytes; may be none."""
        *events, self._rest = (self._rest + part).split(_END)
        return b"".join(passed for event in events if (passed := self._take_event(event)))

    def _take_event(self, event: bytes) -> bytes:
        if self.error is not None:
            return b""  # vLLM puts its end behind it.
        note = b""
        if event.startswith(wire.NOTE_MARK):
            note, _, event = event.partition(b"\n")
        # Only where the stream could go on, or begin: else the client gets what the engine said.
        if event.startswith(ERROR_EVENT) and (self.can_resume or not self._passed):
            self.error = event + _END
            return b""
        self.done = event == _DONE
        if self._skip:
            self._skip -= 1
            return b""
        if self._created is None:
            self._read_first(event)
        elif self._passed and event.startswith(b"data: {"):
            # It is one answer to the client, whenever the engine that goes on has begun.
            event = _CREATED.sub(self._created, event, count=1)
        if note:
            self.notes += note + b"\n"
        self._passed += 1
        return event + _END

    def _read_first(self, event: bytes) -> None:
        if found := _ID.search(event):
            self.request_id = found[1].decode(errors="replace")
        if found := _CREATED.search(event):
            self._created = found[0]
