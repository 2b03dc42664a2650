"""Has a response's events, its last event and its body agree.

A stream of vLLM 0.32 that is cut by length ends in ``response.completed``
(vllm-project/vllm#45386), and items that were cut are completed (#57998). Here
``response.incomplete`` ends an incomplete response, whose cut item says so. Members that OpenAI's
clients require are added, and nulls that they refuse are left out.

Ids are made of the response's own id and of positions in it. So they are the same on whichever
decoder goes on with a stream, and an item's id tells its response (`conserve.items`).
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from starlette.types import Message, Send

from conserve.items import call_id, item_id

_BEGINNINGS = (b"event: response.created\n", b"event: response.in_progress\n")
_ADDED = b"event: response.output_item.added\n"
_DONE = b"event: response.output_item.done\n"
_PART_DONE = b"event: response.content_part.done\n"
_INCOMPLETE = "response.incomplete"
_ENDS = (b"event: response.completed\n", b"event: response.incomplete\n")
_KEPT = ("completed", "incomplete")
_DATA = b"data: "
_NO_LOGPROBS = b'"logprobs":null'
_EMPTY_LOGPROBS = b'"logprobs":[]'

Json = dict[str, Any]


class _ItemEvent(msgspec.Struct):
    type: str
    item: Json
    output_index: int
    sequence_number: int = 0


class _ResponseEvent(msgspec.Struct):
    type: str
    response: dict[str, msgspec.Raw]
    sequence_number: int = 0


_ITEM_EVENT = msgspec.json.Decoder(_ItemEvent)
_RESPONSE_EVENT = msgspec.json.Decoder(_ResponseEvent)
_RESPONSE = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ITEMS = msgspec.json.Decoder(list[Json])
_TEXT = msgspec.json.Decoder(str)
_encode = msgspec.json.encode


def is_stream(start: Message) -> bool:
    """Return whether an answer is a stream of events, by its first message."""
    return any(
        name.lower() == b"content-type" and value.startswith(b"text/event-stream")
        for name, value in start["headers"]
    )


class AgreeingResponse:
    """An ASGI ``send`` that corrects one response, and adds the members in ``more``.

    ``keep`` is given a response that is complete or incomplete, before the client learns of its
    end.
    """

    def __init__(
        self,
        send: Send,
        response_id: str,
        more: Mapping[str, Any],
        keep: Callable[[bytes], None] = lambda response: None,
    ) -> None:
        self._send = send
        self._keep = keep
        self._id = response_id
        self._more = {name: msgspec.Raw(_encode(value)) for name, value in more.items()}
        # An answer in one piece: its first message, and its body so far.
        self._start: Message | None = None
        self._parts: list[bytes] = []
        self._streamed = False
        # An item's last event waits for the next one, which says whether the item is whole.
        self._done: _ItemEvent | None = None
        self._items: list[Json] = []
        # vLLM's id of the current item, and the id that it gets.
        self._renamed: tuple[bytes, bytes] | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._streamed = is_stream(message)
            if not self._streamed and message["status"] == 200:
                self._start = message
                return
        elif self._streamed and message["type"] == "http.response.body":
            await self._pass_on(message)
            return
        elif self._start is not None and message["type"] == "http.response.body":
            self._parts.append(message.get("body", b""))
            if not message.get("more_body"):
                await self._send_whole(self._start, message)
            return
        await self._send(message)

    async def _send_whole(self, start: Message, end: Message) -> None:
        body = b"".join(self._parts)
        try:
            response = _RESPONSE.decode(body)
            items = _ITEMS.decode(response["output"])
        except (msgspec.DecodeError, KeyError):
            pass  # It is no response.
        else:
            for position, item in enumerate(items):
                item["id"] = item_id(self._id, item.get("type", ""), position)
            body = _encode(self._whole(response, items))
        headers = [(name, value) for name, value in start["headers"] if name != b"content-length"]
        length = (b"content-length", str(len(body)).encode())
        await self._send({**start, "headers": [*headers, length]})
        await self._send({**end, "body": body})

    def _whole(self, response: dict[str, msgspec.Raw], items: list[Json]) -> Json:
        status = _TEXT.decode(response["status"])
        if status == "incomplete" and items:
            items[-1]["status"] = status
        whole: Json = {**self._filled(response), "output": [_plain(item) for item in items]}
        if status == "completed":
            whole["completed_at"] = int(time.time())
        if status in _KEPT:
            self._keep(_encode(whole))
        return whole

    def _filled(self, response: dict[str, msgspec.Raw]) -> Json:
        """Return a response with the members that vLLM leaves out."""
        given = {name: value for name, value in response.items() if bytes(value) != b"null"}
        return {**response, **self._more, **given}

    async def _pass_on(self, message: Message) -> None:
        event = message.get("body", b"")
        if event.startswith(_ENDS):
            event = self._last(event)
        if self._done is not None:
            done, self._done = self._done, None
            await self._send({**message, "body": _written(done), "more_body": True})
        if event.startswith(_DONE):
            self._done, _ = self._named(event)
            self._items.append(self._done.item)
            return
        if event.startswith(_ADDED):
            told, own_id = self._named(event)
            self._renamed = own_id.encode(), told.item["id"].encode()
            event = _written(told)
        elif event.startswith(_BEGINNINGS):
            begun = _RESPONSE_EVENT.decode(event.partition(_DATA)[2])
            begun.response = self._filled(begun.response)
            event = _written(begun)
        elif self._renamed is not None:
            event = event.replace(*self._renamed)
            if event.startswith(_PART_DONE):
                event = event.replace(_NO_LOGPROBS, _EMPTY_LOGPROBS)
        await self._send({**message, "body": event})

    def _named(self, event: bytes) -> tuple[_ItemEvent, Any]:
        """Return an item's event under the item's new id, and vLLM's id of it."""
        told = _ITEM_EVENT.decode(event.partition(_DATA)[2])
        item, position, own_id = told.item, told.output_index, told.item.get("id")
        item["id"] = item_id(self._id, item["type"], position)
        if "call_id" in item:
            item["call_id"] = call_id(self._id, position)
        told.item = _plain(item)
        return told, own_id

    def _last(self, event: bytes) -> bytes:
        told = _RESPONSE_EVENT.decode(event.partition(_DATA)[2])
        told.response = self._whole(told.response, self._items)
        if _TEXT.decode(told.response["status"]) == "incomplete":
            told.type = _INCOMPLETE
            if self._done is not None:
                self._done.item["status"] = "incomplete"
        return _written(told)


def _written(event: _ItemEvent | _ResponseEvent) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event.type.encode(), _encode(event))


def _plain(item: Json) -> Json:
    own = {name: value for name, value in item.items() if value is not None}
    # vLLM gives calls of gpt-oss an event's members.
    for name in ("output_index", "sequence_number"):
        own.pop(name, None)
    if own.get("type") == "message":
        own["content"] = [
            {**part, "logprobs": part.get("logprobs") or []}
            if part.get("type") == "output_text"
            else part
            for part in own.get("content", ())
        ]
    return own
