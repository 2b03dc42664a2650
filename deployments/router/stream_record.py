"""Records what a client has of a stream, so that another decoder can go on with it."""

import json
import re

from conserve import apis, wire
from conserve.errors import from_engine
from conserve.turn import TurnStats

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
