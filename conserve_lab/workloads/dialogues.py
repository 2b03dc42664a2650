"""Recorded dialogues with tool calls, replayed as text with the model's own answers.

The format is that of ``historical_trajectories`` of ``sierra-research/tau-bench``: a list of
objects, or lines of them, whose ``traj`` is a list of OpenAI-style messages. System, user and tool
messages are sent as recorded; each assistant message is a turn, and the model's answer takes its
place.

The model need not do what the recorded one did, and the chat has to stay valid. If it made tool
calls, they get the recorded results in order; calls beyond those get a result that says so, and
results beyond the calls are sent as the user's text. If it made none, or one that cannot be part of
a chat (no name, or arguments that are no JSON object), all are text.

An answer is limited to the recorded one's length (a token for four characters), unless a limit is
given. The recordings have no times: gaps are exponential.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from conserve_lab.records import Answer, TurnRequest
from conserve_lab.workloads.plan import (
    Arrivals,
    Arriving,
    PlayedScript,
    Turns,
    Workload,
    choose,
    require,
)
from conserve_lab.workloads.traces import read_json, recordings

CHAT = "/v1/chat/completions"
NO_RESULT = "Error: this tool gave no result."

_CHARS_A_TOKEN = 4
_WANTED = (
    "dialogues are read in the format of tau-bench's historical_trajectories, "
    "a list of objects with `traj`, or one a line of *.jsonl"
)

Message = dict[str, Any]


class _Function(msgspec.Struct):
    name: str
    arguments: str


class _ToolCall(msgspec.Struct):
    function: _Function


class _RawMessage(msgspec.Struct):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _RawDialogue(msgspec.Struct):
    traj: list[_RawMessage]


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """A turn: the system's and user's messages before it, and results of the calls of the answer
    before.
    """

    messages: tuple[Message, ...]
    results: tuple[str, ...]
    max_output_tokens: int


def dialogues(
    path: Path,
    *,
    conversations: int,
    arrivals: Arrivals,
    mean_gap_s: float = 5.0,
    max_output_tokens: int | None = None,
    seed: int = 0,
) -> Workload:
    """Recorded dialogues, drawn without repeating one until all were drawn.

    Args:
        path: plain JSON or compressed with gzip.
        mean_gap_s: mean of the exponential gaps between an answer and the next turn.
        max_output_tokens: None: each recorded answer's approximate length.

    Raises WorkloadError: a setting is wrong, or the file is broken.
    """
    require(conversations > 0, f"{conversations} conversations are asked for; give a number from 1")
    require(
        math.isfinite(mean_gap_s) and mean_gap_s >= 0,
        f"mean_gap_s is {mean_gap_s:g}; give seconds from 0",
    )
    require(
        max_output_tokens is None or max_output_tokens > 0,
        f"max_output_tokens is {max_output_tokens}; give tokens from 1, or none",
    )
    require(seed >= 0, f"the seed is {seed}; give one from 0")
    recordings = _read(path)
    plans = [_turns(messages, max_output_tokens) for messages in recordings]
    chosen = list(islice(choose(range(len(plans)), seed), conversations))

    def arrive() -> Iterator[Arriving]:
        for index, (number, at_s) in enumerate(zip(chosen, arrivals.times_s(), strict=False)):
            rng = np.random.default_rng([seed, index])
            later_s = rng.standard_exponential(len(plans[number]) - 1) * mean_gap_s
            gaps_s = [0.0, *later_s.tolist()]
            name = f"{index:05d}-dialogue-{number}"
            yield at_s, PlayedScript(name, _play(name, plans[number], gaps_s))

    turns = sum(len(plans[number]) for number in chosen)
    return Workload("dialogues", {"conversations": conversations, "turns": turns}, arrive)


def _play(name: str, turns: Sequence[RecordedTurn], gaps_s: Sequence[float]) -> Turns:
    messages: list[Message] = []
    answer: Answer | None = None
    for number, (turn, gap_s) in enumerate(zip(turns, gaps_s, strict=True)):
        if number == 0:
            messages.extend(turn.messages)
        elif answer is None:
            raise ValueError(f"{name}: turn {number + 1} follows no answer")
        else:
            messages.extend(continuation(answer, turn, f"call_{number}"))
        body = partial(chat, tuple(messages), turn.max_output_tokens)
        answer = yield TurnRequest(gap_s=gap_s, path=CHAT, body=body)


def chat(
    messages: Sequence[Message], max_tokens: int, tools: Sequence[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """The body of a streamed, greedy chat completion; without ``tools`` where there are none."""
    body = {
        "messages": list(messages),
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return body if tools is None else body | {"tools": list(tools)}


def continuation(answer: Answer, turn: RecordedTurn, call_prefix: str) -> list[Message]:
    """Return the answer and what is said after it, as messages that go on with any valid chat."""
    calls, said = _calls(answer, call_prefix)
    messages: list[Message] = [{"role": "assistant", "content": said}]
    if calls:
        messages[0] |= {"content": said or None, "tool_calls": calls}
    for index, call in enumerate(calls):
        result = turn.results[index] if index < len(turn.results) else NO_RESULT
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    spare = turn.results[len(calls) :]
    texts = [*spare, *(message["content"] for message in turn.messages)]
    if texts:
        # All in one message: some templates refuse two of the user's in a row.
        messages.append({"role": "user", "content": "\n\n".join(texts)})
    return messages


def _read(path: Path) -> list[list[_RawMessage]]:
    found = []
    for recording in recordings(path):
        raw = read_json(recording, list[_RawDialogue] | _RawDialogue, _WANTED)
        for index, dialogue in enumerate(raw if isinstance(raw, list) else [raw]):
            _check(dialogue.traj, f"{recording.name}: [{index}].traj")
            found.append(dialogue.traj)
    require(bool(found), f"{path} has no dialogues; {_WANTED}")
    return found


def _check(messages: Sequence[_RawMessage], where: str) -> None:
    before: str | None = None
    for index, message in enumerate(messages):
        here = f"{where}[{index}]"
        role = message.role
        if role == "assistant":
            require(before is not None, f"{here} is the assistant's, with nothing before it")
            require(before != "assistant", f"{here} is the assistant's, as the one before it")
            said = message.content is not None or bool(message.tool_calls)
            require(said, f"{here} has neither content nor tool_calls")
        else:
            require(message.content is not None, f"{here} has no content")
        if role == "system":
            require(before is None, f"{here} is a system message that is not the first one")
        if role == "tool":
            require(before in ("assistant", "tool"), f"{here} is a tool's, but answers no call")
        before = role
    require(
        any(message.role == "assistant" for message in messages),
        f"{where} has no assistant message, so there is no turn",
    )


def _turns(
    recorded: Sequence[_RawMessage], max_output_tokens: int | None
) -> tuple[RecordedTurn, ...]:
    turns = []
    messages: list[Message] = []
    results: list[str] = []
    for message in recorded:
        if message.role == "assistant":
            limit = max_output_tokens or _approximate_tokens(message)
            turns.append(RecordedTurn(tuple(messages), tuple(results), limit))
            messages, results = [], []
        elif message.role == "tool":
            results.append(message.content or "")
        else:
            messages.append({"role": message.role, "content": message.content})
    return tuple(turns)


def _approximate_tokens(message: _RawMessage) -> int:
    functions = [call.function for call in message.tool_calls or ()]
    chars = len(message.content or "")
    chars += sum(len(function.name) + len(function.arguments) for function in functions)
    return max(1, math.ceil(chars / _CHARS_A_TOKEN))


def _calls(answer: Answer, prefix: str) -> tuple[list[dict[str, Any]], str]:
    """Return the answer's calls as a chat's history has them, and its text."""
    calls = []
    for index, call in enumerate(answer.tool_calls):
        function = call.get("function") or {}
        name, arguments = function.get("name") or "", function.get("arguments") or ""
        if not name or _arguments(arguments) is None:
            written = (json.dumps(call.get("function")) for call in answer.tool_calls)
            return [], "\n".join(filter(None, (answer.content, *written)))
        calls.append(
            {
                "id": call.get("id") or f"{prefix}_{index}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
        )
    return calls, answer.content


def _arguments(text: str) -> dict[str, Any] | None:
    """Parse a call's arguments; None where they are no JSON object."""
    try:
        parsed = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None
