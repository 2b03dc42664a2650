"""Reads a streamed answer: an event stream of OpenAI completions or chat completions.

Every token of thousands of conversations passes here, so an event is decoded once, into structures
that hold only the fields read below (a few microseconds each).
"""

from typing import Any

import msgspec

from conserve_lab.records import Answer

_MAX_ECHO_CHARS = 300


class EventSplitter:
    """Cuts a stream of bytes into the payloads of its events.

    Lines end with LF or CRLF, an empty line ends an event, several ``data`` lines are one payload,
    comments and other fields are skipped, and an event that the stream's end cuts off is no event.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, part: bytes) -> list[bytes]:
        """Return the payloads that ``part`` completes; a stream may be cut into parts anywhere."""
        lines = (self._rest + part if self._rest else part).split(b"\n")
        self._rest = lines.pop()
        payloads = []
        for line in lines:
            if line.endswith(b"\r"):
                line = line[:-1]
            if line.startswith(b"data:"):
                self._data.append(line[6:] if line.startswith(b"data: ") else line[5:])
            elif not line and self._data:
                payloads.append(b"\n".join(self._data))
                self._data = []
        return payloads


class _FunctionDelta(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _ToolCallDelta(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: _FunctionDelta | None = None


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[_ToolCallDelta] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None
    object: str | None = None
    message: str | None = None


_decode = msgspec.json.Decoder(_Event).decode


class AnswerStream:
    """One streamed answer, as far as it has come. Only the first choice is read.

    Attributes:
        token_times_s: when each event that carries output came: content, reasoning or a tool call.
            The event that only names the role carries none. An event with an empty text does:
            its token is a piece of a character that cannot be shown yet. If it is the one with
            the finish reason, it does where usage has one token more than was seen: vLLM sends
            an end-of-sequence token so, and others none.
        error: what an error event said, or what is wrong with the stream.
        done: whether the stream said ``[DONE]``, without an error before.
    """

    def __init__(self) -> None:
        self._splitter = EventSplitter()
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._tool_calls: dict[int, dict[str, Any]] = {}
        self._silent_end_s: float | None = None
        self.token_times_s: list[float] = []
        self.finish_reason: str | None = None
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.error: str | None = None
        self.done = False

    @property
    def first_token_s(self) -> float | None:
        return self.token_times_s[0] if self.token_times_s else None

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def answer(self) -> Answer:
        calls = tuple(self._tool_calls[index] for index in sorted(self._tool_calls))
        return Answer("".join(self._text), calls)

    def feed(self, part: bytes, now_s: float) -> None:
        for payload in self._splitter.feed(part):
            if self.done or self.error is not None:
                return
            if payload == b"[DONE]":
                self._finish()
                return
            try:
                event = _decode(payload)
            except msgspec.DecodeError as problem:
                shown = payload[:_MAX_ECHO_CHARS].decode(errors="replace")
                self.error = f"the stream has an event that is no completion ({problem}): {shown}"
                return
            self._take(event, now_s)

    def _finish(self) -> None:
        self.done = True
        end_s, seen = self._silent_end_s, len(self.token_times_s)
        if end_s is not None and self.output_tokens == seen + 1:
            self.token_times_s.append(end_s)

    def _take(self, event: _Event, now_s: float) -> None:
        if event.error is not None or event.object == "error":
            self.error = error_message(event.error or event.message)
            return
        for choice in event.choices or ():
            if choice.index != 0:
                continue
            if self._carries_output(choice):
                self.token_times_s.append(now_s)
            elif choice.finish_reason is not None:
                self._silent_end_s = now_s
        usage = event.usage
        if usage is not None:
            self.prompt_tokens = usage.prompt_tokens
            self.output_tokens = usage.completion_tokens
            if usage.prompt_tokens_details is not None:
                self.cached_tokens = usage.prompt_tokens_details.cached_tokens

    def _carries_output(self, choice: _Choice) -> bool:
        finished = choice.finish_reason is not None
        if finished:
            self.finish_reason = choice.finish_reason
        delta = choice.delta
        if delta is None:
            if choice.text:
                self._text.append(choice.text)
                return True
            return choice.text is not None and not finished
        for call in delta.tool_calls or ():
            self._add_to_call(call)
        reasoning = delta.reasoning or delta.reasoning_content
        if reasoning:
            self._reasoning.append(reasoning)
        content = delta.content or delta.refusal
        if content:
            self._text.append(content)
        if content or reasoning or delta.tool_calls:
            return True
        return delta.content is not None and delta.role is None and not finished

    def _add_to_call(self, delta: _ToolCallDelta) -> None:
        call = self._tool_calls.setdefault(
            delta.index, {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
        )
        # Id and name come whole; some servers repeat them.
        call["id"] = call["id"] or delta.id or ""
        if delta.function is not None:
            function = call["function"]
            function["name"] = function["name"] or delta.function.name or ""
            function["arguments"] += delta.function.arguments or ""


def error_message(error: Any) -> str:
    """Say in one line what the ``error`` of an event or of an error response (any JSON) is."""
    if isinstance(error, dict):
        nested = error.get("error")
        error = error.get("message") or (error_message(nested) if nested else error)
    return " ".join(str(error).split())[:_MAX_ECHO_CHARS] or "an error without a message"
