"""Reads answers in what a client was sent: a body, or a stream of events."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec


class _Function(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: str | None = None


class _ToolCallDelta(msgspec.Struct, gc=False):
    index: int = 0
    id: str | None = None
    function: _Function | None = None


class _Delta(msgspec.Struct, gc=False):
    content: str | None = None
    tool_calls: list[_ToolCallDelta] | None = None


class _ChunkChoice(msgspec.Struct, gc=False):
    index: int = 0
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct, gc=False):
    # An error event has no choices, the usage event has none in its list.
    choices: list[_ChunkChoice] = []


class _BodyChoice(msgspec.Struct, gc=False):
    message: dict[str, Any]


class _Body(msgspec.Struct, gc=False):
    choices: list[_BodyChoice] = []


_CHUNK = msgspec.json.Decoder(_Chunk)
_BODY = msgspec.json.Decoder(_Body)
_T = TypeVar("_T")


def read(decoder: "msgspec.json.Decoder[_T]", data: bytes) -> _T | None:
    """Return what these bytes are; None if they cannot be read."""
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def events_in(parts: Iterable[bytes]) -> list[bytes]:
    """Return the data of server-sent events, cut anywhere; each is on a line, as vLLM writes it."""
    return [line[5:] for line in b"".join(parts).splitlines() if line.startswith(b"data:")]


@dataclass(slots=True)
class _Answer:
    text: list[str] = field(default_factory=list)
    calls: dict[int, "_CallParts"] = field(default_factory=lambda: defaultdict(_CallParts))
    finished: bool = False

    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self.text) or None}
        if self.calls:
            message["tool_calls"] = [call.tool_call() for _, call in sorted(self.calls.items())]
        return message


@dataclass(slots=True)
class _CallParts:
    id: str | None = None
    name: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)

    def add(self, delta: _ToolCallDelta) -> None:
        self.id = self.id or delta.id
        if delta.function is not None:
            self.name.append(delta.function.name or "")
            self.arguments.append(delta.function.arguments or "")

    def tool_call(self) -> dict[str, Any]:
        function = {"name": "".join(self.name), "arguments": "".join(self.arguments)}
        return {"id": self.id, "type": "function", "function": function}


def answers_from_body(body: bytes) -> list[dict[str, Any]]:
    """Return the answers in a chat completion, one message a choice; none in an error."""
    found = read(_BODY, body)
    choices = [] if found is None else found.choices
    return [{"role": "assistant", **choice.message} for choice in choices]


def answers_from_stream(chunks: Iterable[bytes]) -> list[dict[str, Any]]:
    """Return the answers in a streamed chat completion, one message a finished choice."""
    answers: defaultdict[int, _Answer] = defaultdict(_Answer)
    for data in events_in(chunks):
        event = read(_CHUNK, data)
        # "[DONE]", and the event at which the stream was cut, are none.
        for choice in () if event is None else event.choices:
            answer = answers[choice.index]
            if choice.finish_reason is not None:
                answer.finished = True
            delta = choice.delta
            if delta is None:
                continue
            if delta.content:
                answer.text.append(delta.content)
            for call in delta.tool_calls or ():
                answer.calls[call.index].add(call)
    return [answer.message() for _, answer in sorted(answers.items()) if answer.finished]
