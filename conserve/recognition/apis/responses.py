"""Converts items of OpenAI's Responses API to the messages of a chat.

There a message, the reasoning before it and the calls after it are separate items; in a chat they
are one message. It agrees with vLLM's ``construct_input_messages``, which gets each item in the
form of `conserve.canonical_items`.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from conserve.recognition.answers import events_in, read

Message = dict[str, Any]

_ARRAY = (list, tuple)
# Between a group of tools and one of them, in the name that vLLM shows to the model.
_NAMESPACE_SEPARATOR = "__"
_WHOLE = ("completed", "incomplete")


def messages_in(body: Mapping[str, Any]) -> list[Any]:
    found: list[Any] = []
    instructions = body.get("instructions")
    if instructions:
        found.append({"role": "system", "content": instructions})
    given = body.get("input")
    if isinstance(given, str):
        return [*found, {"role": "user", "content": given}]
    return found + _converted(given if isinstance(given, _ARRAY) else [given])


def functions(tool: Any) -> list[Any]:
    """Return a tool's functions, as a chat has them; none if the model does not see it."""
    if not isinstance(tool, Mapping):
        return [tool]
    if tool.get("type") == "namespace":
        inner = tool.get("tools")
        return [
            chat_function(one, _flat(tool.get("name"), one.get("name")))
            for one in (inner if isinstance(inner, _ARRAY) else [])
            if isinstance(one, Mapping) and one.get("type") == "function"
        ]
    return [chat_function(tool, tool.get("name"))] if tool.get("type") == "function" else []


def chat_function(tool: Mapping[str, Any], name: Any) -> Message:
    shown = {"name": name, **{key: tool.get(key) for key in ("description", "parameters")}}
    function = {key: value for key, value in shown.items() if value is not None}
    return {"type": "function", "function": function}


def _flat(namespace: Any, name: Any) -> Any:
    return f"{namespace}{_NAMESPACE_SEPARATOR}{name}" if namespace else name


def _converted(items: Iterable[Any]) -> list[Any]:
    found: list[Any] = []
    # The assistant's message that the next item may be a part of.
    open_: Message | None = None
    for item in items:
        message = _message(item, open_)
        if message is None:
            continue
        found.append(message)
        own = isinstance(message, dict) and message.get("role") == "assistant"
        open_ = message if own else None
    return found


def _message(item: Any, before: Message | None) -> Any:
    """Return the message that an item begins; None if it went into the one ``before``."""
    if not isinstance(item, Mapping):
        return item
    kind, role = item.get("type"), item.get("role")
    if kind == "function_call":
        name = _flat(item.get("namespace"), item.get("name"))
        function = {"name": name, "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        if before is not None:
            before.setdefault("tool_calls", []).append(call)
            return None
        return {"role": "assistant", "tool_calls": [call]}
    if kind == "reasoning":
        return _merged("reasoning", _reasoning(item), before)
    if kind == "function_call_output":
        told = {"role": "tool", "tool_call_id": item.get("call_id")}
        return {**told, "content": _content(item.get("output"))}
    if role is None or kind not in (None, "message"):
        # The engine takes it for no message either; it is kept whole, so that it counts.
        return [item]
    content = _content(item.get("content"))
    if role == "assistant":
        return _merged("content", content, before)
    return {"role": role, "content": content}


def _merged(name: str, value: Any, before: Message | None) -> Message | None:
    if before is not None and name not in before:
        before[name] = value
        return None
    return {"role": "assistant", name: value}


def _reasoning(item: Mapping[str, Any]) -> Any:
    for name in ("content", "summary"):
        parts = item.get(name)
        if isinstance(parts, _ARRAY) and parts and isinstance(parts[0], Mapping):
            return parts[0].get("text")
    return ""


def _content(content: Any) -> Any:
    if not isinstance(content, _ARRAY):
        return content
    return [_as_in_chats(part) for part in content]


def _as_in_chats(part: Any) -> Any:
    if not isinstance(part, Mapping) or part.get("type") != "input_image":
        return part
    image = {"url": part.get("image_url")}
    if part.get("detail") not in (None, "auto"):
        image["detail"] = part["detail"]
    return {"type": "image_url", "image_url": image}


class _Response(msgspec.Struct, gc=False):
    object: str = ""
    status: str = ""
    output: list[Any] = []


class _Event(msgspec.Struct, gc=False):
    type: str = ""
    response: _Response | None = None


_BODY = msgspec.json.Decoder(_Response)
_EVENT = msgspec.json.Decoder(_Event)


def answers_in_body(parts: Iterable[bytes]) -> list[Message]:
    return _answers(read(_BODY, b"".join(parts)))


def answers_in_stream(parts: Iterable[bytes]) -> list[Message]:
    """Return the answer in a stream of events, from its last; none if that has no response."""
    *_, last = (b"", *events_in(parts))
    event = read(_EVENT, last)
    return _answers(None if event is None else event.response)


def _answers(response: _Response | None) -> list[Message]:
    if response is None or response.object != "response" or response.status not in _WHOLE:
        return []
    messages = _converted(response.output) or [{"role": "assistant"}]
    # An answer of a chat is one message.
    alone = len(messages) == 1 and isinstance(messages[0], dict)
    return messages if alone else []
