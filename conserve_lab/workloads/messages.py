"""Reads conversations in messages: OpenAI's, ShareGPT's, and tau-bench's ``traj``.

As a session each of the assistant's messages is a call, with all before it as its prompt. OpenAI's
are requests, so what stands at their end gets an answer too. Lengths are of texts, of tools' names,
arguments and declarations, and of a frame for each message; parts other than text count nothing.
"""

from collections.abc import Callable
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from conserve_lab.records import SharedPrefix
from conserve_lab.workloads.plan import WorkloadError, require
from conserve_lab.workloads.tokens import key
from conserve_lab.workloads.traces import ANSWER_TOKENS, Call, RecordedSession, calls_of

_BYTES_A_TOKEN, _FRAME_TOKENS, _BLOCK_TOKENS = 4, 4, 16
# Between an answer and the next prompt.
_PAUSE_S = 5.0
_ROLES = {
    "system": ("system", "developer"),
    "user": ("user", "human"),
    "assistant": ("assistant", "gpt", "chatgpt", "bing", "bard", "model", "function_call"),
    "tool": ("tool", "function", "observation"),
}


class _Part(msgspec.Struct):
    text: str = ""


class _Function(msgspec.Struct):
    name: str = ""
    arguments: Any = ""


class _ToolCall(msgspec.Struct):
    function: _Function


class Message(msgspec.Struct, rename={"sender": "from"}):
    role: str | None = None
    content: str | list[_Part] | None = None
    tool_calls: list[_ToolCall] | None = None
    sender: str | None = None
    value: str | None = None

    @property
    def whole(self) -> str:
        called = [one.function for one in self.tool_calls or ()]
        return "".join((self.value or "", *(one.name + _json(one.arguments) for one in called)))


class Conversation(msgspec.Struct):
    """A conversation as files have it, in one of these fields."""

    messages: list[Message] = []
    conversations: list[Message] = []
    conversation: list[Message] = []
    traj: list[Message] = []
    tools: Any = ""

    def said(self, name: str) -> list[Message]:
        """Return its messages, with our roles, and texts as values; errors call it by the name."""
        field = next((field for field in FORMATS if getattr(self, field)), "messages")
        found: list[Message] = getattr(self, field)
        for index, one in enumerate(found):
            given = one.role or one.sender
            one.role = next((role for role, names in _ROLES.items() if given in names), None)
            problem = f"expected {', '.join(_ROLES)}, or a known word for one, found {given!r}"
            require(one.role is not None, f"{name}: {field}[{index}].role: {problem}")
            if isinstance(one.content, list):
                one.content = "".join(part.text for part in one.content)
            one.value = one.value if one.content is None else one.content
        return found


FORMATS = dict.fromkeys(("messages", "conversations", "conversation", "traj"), Conversation)


def recorded_session(raw: Conversation, name: str, count: Callable[[str], int]) -> RecordedSession:
    """Return a conversation as a session, whose texts have as many tokens as ``count`` says."""
    said, tools = raw.said(name), _json(raw.tools)
    prompt = count(tools)
    system = [one.whole for one in takewhile(lambda one: one.role == "system", said)]
    begin = prompt + sum(count(text) + _FRAME_TOKENS for text in system)
    begins = SharedPrefix(key("tools", tools), prompt), SharedPrefix(key(tools, *system), begin)
    calls: list[Call] = []
    waiting = False
    for message, after in pairwise([*said, Message("user")]):
        tokens = count(message.whole)
        if message.role == "assistant" and waiting:
            tool = message.tool_calls[0].function.name if message.tool_calls else None
            stop = "end_turn" if tool is None and after.role != "tool" else "tool_use"
            calls.append(Call(_PAUSE_S * len(calls), prompt, tokens, None, stop, tool))
        waiting = message.role != "assistant"
        prompt += tokens + _FRAME_TOKENS
    if waiting and (raw.messages or not calls):
        calls.append(Call(_PAUSE_S * len(calls), prompt, ANSWER_TOKENS, None, "end_turn"))
    require(bool(calls), f"{name}: expected a message that an assistant can answer, found none")
    assumed = [f"gaps of {_PAUSE_S:g} s"]
    if count is estimate:
        assumed.append(f"{_BYTES_A_TOKEN} bytes of text for a token (--tokenizer counts them)")
    whole = np.arange(calls[-1].prompt // _BLOCK_TOKENS)
    blocks = [whole[: call.prompt // _BLOCK_TOKENS] for call in calls]
    made = calls_of(calls, blocks, whole[: -(-begin // _BLOCK_TOKENS)])
    return RecordedSession(Path(name).name, _BLOCK_TOKENS, begins, made, assumed=tuple(assumed))


def _json(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def estimate(text: str) -> int:
    return -(-len(text.encode()) // _BYTES_A_TOKEN)


def counter(tokenizer: Path | None) -> Callable[[str], int]:
    """Return what counts tokens: the tokenizer in a model's folder or a file, else an estimate."""
    if tokenizer is None:
        return estimate
    from tokenizers import Tokenizer

    path = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    try:
        found = Tokenizer.from_file(str(path))
    except Exception as error:  # They have no class of their own.
        raise WorkloadError(f"--tokenizer {path} cannot be read: {error}") from None
    return lambda text: len(found.encode(text, add_special_tokens=False))
