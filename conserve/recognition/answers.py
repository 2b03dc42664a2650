"""Reads answers in what a client was sent: a body, or a stream of events."""

from collections import defaultdict
from collections.abc import Iterable
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


def answers_from_body(body: bytes) -> list[dict[str, Any]]:
    """Return the answers in a chat completion, one message a choice; none in an error."""
    found = read(_BODY, body)
    choices = [] if found is None else found.choices
    return [{"role": "assistant", **choice.message} for choice in choices]


def answers_from_stream(chunks: Iterable[bytes]) -> list[dict[str, Any]]:
    """Return the answers in a streamed chat completion, one message a finished choice."""
    deltas: defaultdict[int, list[_Delta]] = defaultdict(list)
    finished = set()
    for data in events_in(chunks):
        event = read(_CHUNK, data)
        # "[DONE]", and the event at which the stream was cut, are none.
        for choice in () if event is None else event.choices:
            if choice.finish_reason is not None:
                finished.add(choice.index)
            if choice.delta is not None:
                deltas[choice.index].append(choice.delta)
    return [_message(deltas[index]) for index in sorted(finished)]


def _message(deltas: Iterable[_Delta]) -> dict[str, Any]:
    texts: list[str] = []
    calls: defaultdict[int, list[_ToolCallDelta]] = defaultdict(list)
    for delta in deltas:
        texts.append(delta.content or "")
        for part in delta.tool_calls or ():
            calls[part.index].append(part)
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) or None}
    if calls:
        message["tool_calls"] = [_call(parts) for _, parts in sorted(calls.items())]
    return message


def _call(parts: Iterable[_ToolCallDelta]) -> dict[str, Any]:
    functions = [part.function for part in parts if part.function is not None]
    function = {
        "name": "".join(one.name or "" for one in functions),
        "arguments": "".join(one.arguments or "" for one in functions),
    }
    id_ = next((part.id for part in parts if part.id), None)
    return {"id": id_, "type": "function", "function": function}
