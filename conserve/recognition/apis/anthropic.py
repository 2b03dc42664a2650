"""Converts requests and answers of Anthropic's Messages API to those of chats.

It agrees with vLLM's ``AnthropicServingMessages.to_chat_completion_request``, except that this does
not move later system messages to the beginning, which vLLM does for some chat templates.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from conserve.recognition.answers import events_in, read
from conserve.recognition.normal import BILLING_MARK

Message = dict[str, Any]

_ARRAY = (list, tuple)


def messages_in(body: Mapping[str, Any]) -> list[Any]:
    found: list[Any] = []
    system = _system_text(body.get("system"))
    if system:
        found.append({"role": "system", "content": system})
    given = body.get("messages")
    for message in given if isinstance(given, _ARRAY) else [given]:
        found += _converted(message)
    return found


def tool(given: Any) -> Any:
    if not isinstance(given, Mapping):
        return given
    function = {name: given[name] for name in ("name", "description") if given.get(name)}
    schema = given.get("input_schema")
    if isinstance(schema, Mapping):
        function["parameters"] = schema if "type" in schema else {**schema, "type": "object"}
    return {"type": "function", "function": function}


def _system_text(content: Any) -> str:
    """Join blocks without anything between them, but for Claude Code's billing block."""
    if isinstance(content, str):
        return content
    texts = [
        block["text"]
        for block in (content if isinstance(content, _ARRAY) else [])
        if isinstance(block, Mapping)
        and block.get("type") == "text"
        and isinstance(block.get("text"), str)
    ]
    return "".join(text for text in texts if not text.startswith(BILLING_MARK))


def _converted(message: Any) -> list[Any]:
    """Return the chat's messages for one message; each tool result is one, and comes first."""
    if not isinstance(message, Mapping):
        return [message]
    role, content = message.get("role"), message.get("content")
    if role == "system":
        billing = isinstance(content, str) and content.startswith(BILLING_MARK)
        text = "" if billing else _system_text(content)
        return [{"role": role, "content": text}] if text else []
    if not isinstance(content, _ARRAY):
        return [{"role": role, "content": content}]
    found: list[Any] = []
    parts: list[Any] = []
    calls: list[Any] = []
    for block in content:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "text":
            if block.get("text"):
                parts.append({"type": "text", "text": block["text"]})
        elif kind == "image":
            parts.append(_image(block.get("source")))
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            found += _tool_messages(block)
        elif kind == "tool_result":
            parts.append({"type": "text", "text": f"Tool result: {block.get('content') or ''}"})
        elif kind not in ("thinking", "redacted_thinking", "tool_reference"):
            parts.append(block)
    own: Message = {"role": role}
    if calls:
        own["tool_calls"] = calls
    if parts:
        own["content"] = parts
    # A user's message of nothing but results is complete already.
    if parts or role != "user":
        found.append(own)
    return found


def _tool_messages(block: Mapping[str, Any]) -> list[Message]:
    content = block.get("content")
    given = content if isinstance(content, _ARRAY) else None
    items = [item for item in given or () if isinstance(item, Mapping)]
    texts = [
        {"type": "text", "text": item.get("text") or ""}
        for item in items
        if item.get("type") == "text"
    ]
    images = [_image(item.get("source")) for item in items if item.get("type") == "image"]
    tools = [
        {"type": "tool_reference", "name": item.get("tool_name") or item.get("name")}
        for item in items
        if item.get("type") == "tool_reference"
    ]
    told = {"role": "tool", "tool_call_id": block.get("tool_use_id")}
    found: list[Message] = [{**told, "content": content or "" if given is None else texts}]
    if images:
        found.append({"role": "user", "content": images})
    if tools:
        found.append({**told, "content": tools})
    return found


def _image(source: Any) -> Message:
    given = source if isinstance(source, Mapping) else {}
    if given.get("type") == "url":
        url = given.get("url")
    else:
        url = f"data:{given.get('media_type', 'image/jpeg')};base64,{given.get('data', '')}"
    return {"type": "image_url", "image_url": {"url": url}}


class _Delta(msgspec.Struct, gc=False):
    text: str | None = None
    partial_json: str | None = None
    stop_reason: str | None = None


class _Block(msgspec.Struct, gc=False):
    type: str = ""
    text: str | None = None
    name: str | None = None
    id: str | None = None


class _Event(msgspec.Struct, gc=False):
    type: str = ""
    index: int = 0
    content_block: _Block | None = None
    delta: _Delta | None = None


class _Body(msgspec.Struct, gc=False):
    type: str = ""
    content: list[dict[str, Any]] = []


_EVENT = msgspec.json.Decoder(_Event)
_BODY = msgspec.json.Decoder(_Body)


def answers_in_body(parts: Iterable[bytes]) -> list[Message]:
    body = read(_BODY, b"".join(parts))
    if body is None or body.type != "message":
        return []
    return _converted({"role": "assistant", "content": body.content})


def answers_in_stream(parts: Iterable[bytes]) -> list[Message]:
    """Return the answer in a stream of events; none if the stream is not complete."""
    blocks: dict[int, tuple[_Block, list[str]]] = {}
    whole = False
    for event in filter(None, (read(_EVENT, data) for data in events_in(parts))):
        if event.content_block is not None:
            blocks[event.index] = event.content_block, [event.content_block.text or ""]
        elif event.type == "content_block_delta" and event.delta and event.index in blocks:
            blocks[event.index][1].append(event.delta.text or event.delta.partial_json or "")
        whole = whole or event.type == "message_stop"
    if not whole:
        return []
    answer = []
    for _, (block, texts) in sorted(blocks.items()):
        said = "".join(texts)
        # A tool's input stays text, as in a chat.
        answer.append({"type": block.type, "text": said, "name": block.name, "input": said})
    return _converted({"role": "assistant", "content": answer})
