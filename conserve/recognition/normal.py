"""The normal form of a message: its meaning for the model, in canonical bytes.

Some text in a system prompt changes each time, though nothing else has changed. It would keep
histories from being recognised, and their KV from being found.
``billing_header`` is a line of Claude Code's with a hash of the request,
``x-anthropic-billing-header: ...``, as a block of its own or a first line. vLLM leaves such a block
out of prompts; it means nothing to a model. ``times`` are clock times with seconds. They mean
something to a model, so they stay in the prompt and are only ignored when histories are recognised.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from conserve.apis import COUNT_TOKENS, MESSAGES, RESPONSES
from conserve.media import MEMBERS, name_of

BILLING_MARK = "x-anthropic-billing-header"

_ARRAY = (list, tuple)
# In chats the system prompt is a message.
_SYSTEM_FIELDS = {MESSAGES: "system", COUNT_TOKENS: "system", RESPONSES: "instructions"}
SYSTEM_ROLES = ("system", "developer")
# With the day before it, which changes at midnight.
_TIME = re.compile(
    r"(?:\d{4}-\d{2}-\d{2}[T ])?(?<!\d)\d{1,2}:\d{2}:\d{2}(?:[.,]\d{1,9})?"
    r"(?: ?[AaPp]\.?[Mm]\b\.?)?",
    re.ASCII,
)
_NO_TIME = "00:00:00"


def without_times(messages: list[Any]) -> list[Any]:
    """Return a chat's messages with one and the same time wherever a system message has one."""
    return [_timeless(message) if is_system(message) else message for message in messages]


def without_billing_header(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return a request without Claude Code's billing header; the same object if it has none."""
    name = _SYSTEM_FIELDS.get(path, "messages")
    given = body.get(name)
    if name != "messages":
        kept = _headerless(given)
    elif isinstance(given, _ARRAY) and given and is_system(given[0]):
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


def is_system(message: Any) -> bool:
    return isinstance(message, Mapping) and message.get("role") in SYSTEM_ROLES


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


_TEXT_TYPES = ("text", "input_text", "output_text")
_REASONING_TYPES = ("thinking", "reasoning")
_THINK_OPEN = "<think>"
_THINK_CLOSE = "</think>"

# Arguments that may hold more values are compared as text: parsing 8 MiB of "[]," takes seconds.
_MOST_SEPARATORS = 16_384
# Numbers as doubles, as JavaScript clients echo them: 1 is 1.0, and digits past the 53rd bit may
# change. Not strict: models write raw line breaks into argument strings, clients escape them.
_ARGUMENTS = json.JSONDecoder(parse_int=float, strict=False)


def normalised(message: Any) -> list[Any]:
    """Reduce a message to [role, segments, calls]; or [junk]."""
    if not isinstance(message, Mapping):
        return [message]
    role = message.get("role")
    if role == "developer":  # OpenAI's newer word for the same
        role = "system"
    segments = _segments(message.get("content"))
    if role == "assistant" and segments and isinstance(segments[0], str):
        answer = _without_thinking(segments[0])
        segments[:1] = [answer] if answer else []
    return [role, segments, _calls(message)]


def continued(message: Any, answer: Mapping[str, Any]) -> dict[str, Any]:
    begun = message if isinstance(message, Mapping) else {}
    parts, more = _parts(begun.get("content")), _parts(answer.get("content"))
    if parts and more:
        last, first = _raw_text(parts[-1]), _raw_text(more[0])
        if last is not None and first is not None:
            parts[-1:], more[:1] = [last + first], []
    calls = [*_parts(begun.get("tool_calls")), *_parts(answer.get("tool_calls"))]
    return {"role": "assistant", "content": parts + more, "tool_calls": calls}


def _parts(content: Any) -> list[Any]:
    if isinstance(content, _ARRAY):
        return [*content]
    return [] if content is None else [content]


def _raw_text(part: Any) -> str | None:
    text = part.get("text") if isinstance(part, Mapping) else part
    return text if isinstance(text, str) else None


def _segments(content: Any) -> list[Any]:
    """Return content as a list: a str for a run of text, a one-element list for anything else.

    Adjacent text parts are joined by a line break, as vLLM renders them for chat templates that
    take plain strings.
    """
    if content is None:
        return []
    segments: list[Any] = []
    run: list[str] = []  # the text parts since the last other part
    for part in content if isinstance(content, _ARRAY) else [content]:
        text_or_none = _part_text(part)
        if text_or_none is None:
            if run:
                segments.append("\n".join(run))
                run = []
            segments.append([_named(part)])
        elif text_or_none:
            run.append(text_or_none)
    if run:
        segments.append("\n".join(run))
    return segments


def _named(part: Any) -> Any:
    """Return a part with the name of its media in place of these, where they have one."""
    for member in MEMBERS if isinstance(part, Mapping) else ():
        given = part.get(member)
        url = given.get("url") if isinstance(given, Mapping) else given
        name = name_of(url) if isinstance(url, str) else None
        if name is not None:
            return {"type": member, member: name}
    return part


def _part_text(part: Any) -> str | None:
    """Return the trimmed text of a content part, "" for reasoning, None if it is not text."""
    if isinstance(part, str):
        return part.strip()
    if not isinstance(part, Mapping):
        return None
    kind = part.get("type")
    if kind in _REASONING_TYPES:
        return ""
    text = part.get("text")
    if kind in _TEXT_TYPES and isinstance(text, str):
        return text.strip()
    return None


def _without_thinking(text: str) -> str:
    """Return trimmed assistant text without the reasoning that it begins with.

    Without a reasoning parser the engine leaves reasoning in the content. The block may lack its
    end (the answer was cut) or its beginning (the chat template put it into the prompt).
    """
    # Positions, not slices: a text of many marks must not take quadratic time.
    start = 0
    while (close := text.find(_THINK_CLOSE, start)) >= 0:
        opened = text.find(_THINK_OPEN, start, close)
        if opened >= 0 and text[start:opened].strip():
            break  # the answer has begun, and only mentions the marks
        start = close + len(_THINK_CLOSE)
    rest = text[start:].strip()
    return "" if rest.startswith(_THINK_OPEN) else rest


def _calls(message: Mapping[str, Any]) -> list[Any]:
    """Return the tool calls of a message as [name, arguments] each; or [junk]."""
    given = message.get("tool_calls") or []
    return [_call(call) for call in (given if isinstance(given, _ARRAY) else [given])]


def _call(call: Any) -> list[Any]:
    if not isinstance(call, Mapping):
        return [call]
    function = call.get("function")
    if isinstance(function, Mapping):
        return [function.get("name"), _arguments(function.get("arguments"))]
    return [{k: v for k, v in call.items() if v is not None and k not in ("id", "index")}]


def _arguments(arguments: Any) -> Any:
    """Return arguments as [value]; as their trimmed text if that is not JSON."""
    if isinstance(arguments, str):
        text = arguments.strip()
        if text.count(",") + text.count("[") + text.count("{") > _MOST_SEPARATORS:
            return text
        try:
            arguments = _ARGUMENTS.decode(text) if text else None
        except (ValueError, RecursionError):
            return text
    return [{} if arguments is None else arguments]


def encoded(value: Any) -> bytes:
    """Return canonical bytes of a JSON value: only equal values give equal bytes.

    Each piece carries its type and length, so pieces in a row can be told apart. It uses a stack,
    since clients choose the nesting.
    """
    out: list[bytes] = []
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            data = _utf8(item)
            out += (b"s%d:" % len(data), data)
        elif isinstance(item, _ARRAY):
            out.append(b"l%d:" % len(item))
            stack.extend(reversed(item))
        elif isinstance(item, Mapping):
            out.append(b"d%d:" % len(item))
            for key, member in sorted(item.items(), key=_sort_key, reverse=True):
                stack += (member, key)
        elif item is None or isinstance(item, bool):
            out.append(b"%a;" % item)
        elif isinstance(item, int | float):
            out.append(b"%a;" % _double(item))
        else:  # not from JSON; its type is all that is stable about it
            out.append(b"?%a;" % type(item).__name__)
    return b"".join(out)


def _sort_key(pair: tuple[Any, Any]) -> str:
    key = pair[0]
    return key if isinstance(key, str) else type(key).__name__


def _double(number: int | float) -> float:
    try:
        return float(number) + 0.0  # -0.0 becomes 0.0
    except OverflowError:
        return float("inf") if number > 0 else float("-inf")


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        # JSON can escape half a surrogate pair. Whole pairs are put together, as if they had
        # come unescaped; halves become U+FFFD, as clients make them.
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode()
