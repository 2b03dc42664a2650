"""Recognise a conversation by its messages, for agents that send no conversation id.

A turn continues the conversation whose last turn it begins with: that turn's messages, then its
answer. After each turn the digest of "messages plus answer" is kept as the conversation's *tail*
(``tail_digest``, ``TailIndex.add``); when a turn arrives, the digests of its beginnings
(``candidate_digests``) are looked up among the tails, longest first (``TailIndex.match``).

Agents do not echo answers byte for byte, so what is hashed is a message's meaning for the model:
role, text, and tool calls by name and arguments. Everything else is left out (ids, names,
reasoning, fields unknown here), because clients drop it, invent it or rewrite it.

Digests and the index are exact about what is left. A mistake costs little either way: an unknown
history is served as a new conversation.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

Digest = bytes
"""16 bytes (BLAKE2b) that stand for a list of messages."""

_DIGEST_BYTES = 16

_ARRAY = (list, tuple)

_TEXT_TYPES = ("text", "input_text", "output_text")
_REASONING_TYPES = ("thinking", "reasoning")
_THINK_OPEN = "<think>"
_THINK_CLOSE = "</think>"

# Arguments that may hold more values are compared as text. To parse 8 MiB of "[]," takes seconds.
_MOST_SEPARATORS = 16_384
# Numbers as doubles, as JavaScript clients echo them: 1 is 1.0, and digits past the 53rd bit may
# change. Not strict: models write raw line breaks into argument strings, clients escape them.
_ARGUMENTS = json.JSONDecoder(parse_int=float, strict=False)


# --- Digests ------------------------------------------------------------------------------------


def candidate_digests(
    messages: Sequence[Mapping[str, Any]], tenant: str | None = None
) -> list[Digest]:
    """The tails that these messages may continue, longest first.

    One digest for each assistant message that at least one message follows: of all messages up to
    and including it. Never raises, whatever JSON stands in ``messages``.

    Args:
        tenant: whose messages they are; no two tenants have a digest in common.
    """
    hasher = _hasher(tenant)
    digests = []
    for message in _as_list(messages)[:-1]:
        hasher.update(_encoded(_normalised(message)))
        if isinstance(message, Mapping) and message.get("role") == "assistant":
            digests.append(hasher.digest())
    digests.reverse()
    return digests


def tail_digest(
    messages: Sequence[Mapping[str, Any]], answer: Mapping[str, Any], tenant: str | None = None
) -> Digest:
    """The digest of a finished turn: its messages, then its answer.

    It is among the ``candidate_digests`` of every turn of this tenant that begins with these
    messages and this answer. Never raises, whatever JSON stands in the arguments.
    """
    return Beginning(messages, tenant).tail_digest(answer)


class Beginning:
    """A turn's messages, hashed once for all the answers that it may get."""

    __slots__ = ("_hasher",)

    def __init__(self, messages: Sequence[Mapping[str, Any]], tenant: str | None = None) -> None:
        self._hasher = _hasher(tenant)
        for message in _as_list(messages):
            self._hasher.update(_encoded(_normalised(message)))

    def tail_digest(self, answer: Mapping[str, Any]) -> Digest:
        """As `tail_digest` has it."""
        hasher = self._hasher.copy()
        hasher.update(_encoded(_normalised(answer)))
        return hasher.digest()


def _hasher(tenant: str | None) -> "hashlib.blake2b":
    # A key is at most 64 bytes long, and so is a tenant's name.
    return hashlib.blake2b(digest_size=_DIGEST_BYTES, key=(tenant or "").encode())


def _as_list(messages: Any) -> Sequence[Any]:
    # Called before the request is validated: "messages" may be any JSON value.
    return messages if isinstance(messages, _ARRAY) else [messages]


def _normalised(message: Any) -> list[Any]:
    """A message reduced to what counts: [role, segments, calls]; or [junk]."""
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


def _segments(content: Any) -> list[Any]:
    """Content as a list: a str for a run of text, a one-element list for anything else.

    Text parts side by side are joined by a line break, which is how vLLM renders them for chat
    templates that take plain strings.
    """
    if isinstance(content, str):
        text = content.strip()
        return [text] if text else []
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
            segments.append([part])
        elif text_or_none:
            run.append(text_or_none)
    if run:
        segments.append("\n".join(run))
    return segments


def _part_text(part: Any) -> str | None:
    """The trimmed text of a content part, "" for reasoning, None if it is not text."""
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
    """Trimmed assistant text without the reasoning that it begins with.

    Without a reasoning parser the engine leaves reasoning in the content. The block may lack its
    end (the answer was cut) or its beginning (the chat template put it into the prompt).
    """
    # Positions instead of slices: a text made of nothing but marks must not cost quadratic time.
    start = 0
    while (close := text.find(_THINK_CLOSE, start)) >= 0:
        opened = text.find(_THINK_OPEN, start, close)
        if opened >= 0 and text[start:opened].strip():
            break  # the answer has begun, and only mentions the marks
        start = close + len(_THINK_CLOSE)
    rest = text[start:].strip()
    return "" if rest.startswith(_THINK_OPEN) else rest


def _calls(message: Mapping[str, Any]) -> list[Any]:
    """The tool calls of a message: [name, arguments] each; or [junk]."""
    given = message.get("tool_calls") or []
    calls = [_call(call) for call in (given if isinstance(given, _ARRAY) else [given])]
    legacy = message.get("function_call")
    if legacy is not None:
        calls.append(_call({"function": legacy}))
    return calls


def _call(call: Any) -> list[Any]:
    if not isinstance(call, Mapping):
        return [call]
    function = call.get("function")
    if isinstance(function, Mapping):
        return [function.get("name"), _arguments(function.get("arguments"))]
    return [{k: v for k, v in call.items() if v is not None and k not in ("id", "index")}]


def _arguments(arguments: Any) -> Any:
    """Arguments as [value]; as their trimmed text where that is not JSON."""
    if isinstance(arguments, str):
        text = arguments.strip()
        if text.count(",") + text.count("[") + text.count("{") > _MOST_SEPARATORS:
            return text
        try:
            arguments = _ARGUMENTS.decode(text) if text else None
        except (ValueError, RecursionError):
            return text
    return [{} if arguments is None else arguments]


def _encoded(value: Any) -> bytes:
    """Canonical bytes of a JSON value: equal values only give equal bytes.

    Each piece carries its type and length, so pieces written one after another can be told apart.
    A stack instead of recursion: the nesting is the client's choice.
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


# --- Answers ------------------------------------------------------------------------------------


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
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class _Answer:
    """One choice of a streamed answer, while it is put together."""

    __slots__ = ("calls", "finished", "text")

    def __init__(self) -> None:
        self.text: list[str] = []
        self.calls: dict[int, _CallParts] = {}
        self.finished = False

    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self.text) or None}
        if self.calls:
            message["tool_calls"] = [call.tool_call() for _, call in sorted(self.calls.items())]
        return message


class _CallParts:
    __slots__ = ("arguments", "id", "name")

    def __init__(self) -> None:
        self.id: str | None = None
        self.name: list[str] = []
        self.arguments: list[str] = []

    def add(self, delta: _ToolCallDelta) -> None:
        self.id = self.id or delta.id
        if delta.function is not None:
            self.name.append(delta.function.name or "")
            self.arguments.append(delta.function.arguments or "")

    def tool_call(self) -> dict[str, Any]:
        function = {"name": "".join(self.name), "arguments": "".join(self.arguments)}
        return {"id": self.id, "type": "function", "function": function}


def answers_from_body(body: bytes) -> list[dict[str, Any]]:
    """The answers in a chat completion that was not streamed: one message a choice.

    Empty for a body that is anything else, such as an error.
    """
    try:
        choices = _BODY.decode(body).choices
    except _UNREADABLE:
        return []
    return [{"role": "assistant", **choice.message} for choice in choices]


def answers_from_stream(chunks: Iterable[bytes]) -> list[dict[str, Any]]:
    """The answers in a streamed chat completion: one message a choice that was finished.

    ``chunks`` are the raw bytes of the server-sent events, cut anywhere. Each event's JSON is
    taken to stand on one ``data:`` line, as vLLM writes it. Reasoning is left out. A choice
    without a finish reason (the stream was cut, or ended in an error event) is left out too: the
    client cannot echo what neither side knows to be whole. Events that cannot be read are skipped.
    """
    answers: dict[int, _Answer] = {}
    for line in b"".join(chunks).splitlines():
        if not line.startswith(b"data:"):
            continue
        try:
            choices = _CHUNK.decode(line[5:]).choices
        except _UNREADABLE:  # "[DONE]", or the event at which the stream was cut
            continue
        for choice in choices:
            answer = answers.get(choice.index)
            if answer is None:
                answer = answers[choice.index] = _Answer()
            if choice.finish_reason is not None:
                answer.finished = True
            delta = choice.delta
            if delta is None:
                continue
            if delta.content:
                answer.text.append(delta.content)
            for call in delta.tool_calls or ():
                parts = answer.calls.get(call.index)
                if parts is None:
                    parts = answer.calls[call.index] = _CallParts()
                parts.add(call)
    return [answer.message() for _, answer in sorted(answers.items()) if answer.finished]


# --- Index --------------------------------------------------------------------------------------


class TailIndex:
    """Which conversations can be continued by a turn that begins with which digest.

    Conversations with the same messages and the same answers (greedy decoding) have the same
    tail. They stay apart: each continuing turn takes one of them, whose tail then moves on.

    Every operation takes constant time a digest; only ``match`` may pass over busy conversations
    with the same tail. Not thread-safe.
    """

    __slots__ = ("_owners",)

    def __init__(self) -> None:
        # Most tails have one owner, which is then stored bare. Several are an ordered set:
        # OrderedDict, because finding a dict's first key takes time for all keys removed before.
        self._owners: dict[Digest, str | OrderedDict[str, None]] = {}

    def add(self, conversation_id: str, digests: Iterable[Digest]) -> None:
        """Make ``digests`` tails of the conversation (one a choice)."""
        for digest in digests:
            owners = self._owners.setdefault(digest, conversation_id)
            if not isinstance(owners, str):
                owners[conversation_id] = None
            elif owners != conversation_id:
                self._owners[digest] = OrderedDict.fromkeys((owners, conversation_id))

    def discard(self, conversation_id: str, digests: Iterable[Digest]) -> None:
        """Forget that ``digests`` are tails of the conversation, as far as they are."""
        for digest in digests:
            owners = self._owners.get(digest)
            if owners == conversation_id:
                del self._owners[digest]
            elif isinstance(owners, OrderedDict):
                owners.pop(conversation_id, None)
                if len(owners) == 1:
                    self._owners[digest] = next(iter(owners))

    def match(self, candidates: Iterable[Digest], busy: Callable[[str], bool]) -> str | None:
        """The conversation that a turn with these ``candidate_digests`` continues, or None.

        The first candidate that is a tail decides. Of several conversations with that tail, one
        that is not ``busy`` (has no turn running) is preferred, the least recently matched first;
        if all are, the least recently matched.
        """
        for digest in candidates:
            owners = self._owners.get(digest)
            if owners is None:
                continue
            if isinstance(owners, str):
                return owners
            chosen = next((owner for owner in owners if not busy(owner)), None)
            if chosen is None:
                chosen = next(iter(owners))
            # It is about to be busy: let the next match meet the others first.
            owners.move_to_end(chosen)
            return chosen
        return None
