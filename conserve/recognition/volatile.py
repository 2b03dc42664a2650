"""Text in requests that changes each time, though nothing else has changed.

In the system prompt it would keep histories from being recognised, and their KV from being found.
``billing_header`` is a line of Claude Code's with a hash of the request,
``x-anthropic-billing-header: ...``, as a block of its own or a first line. vLLM leaves such a block
out of prompts; it means nothing to a model. ``times`` are clock times with seconds. They mean
something to a model, so they stay in the prompt and are only ignored when histories are recognised.
"""

import re
from collections.abc import Mapping
from typing import Any

from conserve.apis import COUNT_TOKENS, MESSAGES, RESPONSES

KINDS = ("billing_header", "times")

BILLING_MARK = "x-anthropic-billing-header"

_ARRAY = (list, tuple)
# In chats the system prompt is a message.
_SYSTEM_FIELDS = {MESSAGES: "system", COUNT_TOKENS: "system", RESPONSES: "instructions"}
_SYSTEM_ROLES = ("system", "developer")
# With the day before it, which changes at midnight.
_TIME = re.compile(
    r"(?:\d{4}-\d{2}-\d{2}[T ])?(?<!\d)\d{1,2}:\d{2}:\d{2}(?:[.,]\d{1,9})?"
    r"(?: ?[AaPp]\.?[Mm]\b\.?)?",
    re.ASCII,
)
_NO_TIME = "00:00:00"


def without_times(messages: list[Any]) -> list[Any]:
    """Return a chat's messages with one and the same time wherever a system message has one."""
    return [_timeless(message) if _is_system(message) else message for message in messages]


def without_billing_header(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return a request without Claude Code's billing header; the same object if it has none."""
    name = _SYSTEM_FIELDS.get(path, "messages")
    given = body.get(name)
    if name != "messages":
        kept = _headerless(given)
    elif isinstance(given, _ARRAY) and given and _is_system(given[0]):
        content = given[0].get("content")
        text = _headerless(content)
        if text is content:
            return body
        # An empty message is dropped.
        first = [{**given[0], "content": text}] if text or len(given) == 1 else []
        kept = [*first, *given[1:]]
    else:
        return body
    return body if kept is given else {**body, name: kept}


def _headerless(content: Any) -> Any:
    """Return a text, or a list of parts, without the header; the same object if it has none."""
    if isinstance(content, str):
        return content.partition("\n")[2].lstrip("\n") if _begins(content) else content
    if not isinstance(content, _ARRAY) or not any(_begins(_text(part)) for part in content):
        return content
    kept = []
    for part in content:
        text = _text(part)
        if not _begins(text):
            kept.append(part)
        elif rest := _headerless(text):
            kept.append({**part, "text": rest})
    return kept


def _begins(text: Any) -> bool:
    return isinstance(text, str) and text.startswith(BILLING_MARK)


def _text(part: Any) -> Any:
    return part.get("text") if isinstance(part, Mapping) else None


def _is_system(message: Any) -> bool:
    return isinstance(message, Mapping) and message.get("role") in _SYSTEM_ROLES


def _timeless(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": _TIME.sub(_NO_TIME, content)}
    if not isinstance(content, _ARRAY):
        return message
    parts = [
        {**part, "text": _TIME.sub(_NO_TIME, part["text"])}
        if isinstance(_text(part), str)
        else part
        for part in content
    ]
    return {**message, "content": parts}
