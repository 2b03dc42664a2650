"""Recorded dialogues with tool calls, replayed as text with the model's own answers.

`conserve_lab.workloads.messages` has the formats. System, user and tool messages are sent as
recorded; each assistant message is a turn, and the model's answer takes its place.

The model need not do what the recorded one did, and the chat has to stay valid. If it made tool
calls, they get the recorded results in order; calls beyond those get a result that says so, and
results beyond the calls are sent as the user's text. If it made none, or one that cannot be part of
a chat (no name, or arguments that are no JSON object), all are text.

An answer is limited to the recorded one's length (a token for four bytes), unless a limit is
given. The recordings have no times: gaps are exponential.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from conserve_lab.records import Answer, TurnRequest
from conserve_lab.workloads import messages as formats
from conserve_lab.workloads.files import Skipped, notes_of, read_json, recordings, skipping
from conserve_lab.workloads.plan import (
    Arrivals,
    Arriving,
    PlayedScript,
    Turns,
    Workload,
    at_least,
    choose,
    require,
)

CHAT = "/v1/chat/completions"
NO_RESULT = "Error: this tool gave no result."

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """A turn: the system's and user's messages before it, and results of the calls of the answer
    before.
    """

    messages: tuple[Message, ...]
    results: tuple[str, ...]
    max_output_tokens: int


def dialogues(
    *,
    data: Path,
    conversations: int,
    arrivals: Arrivals,
    mean_gap_s: float = 5.0,
    max_output_tokens: int | None = None,
    skip_bad: bool = False,
    seed: int = 0,
) -> Workload:
    """Recorded dialogues, drawn without repeating one until all were drawn.

    Args:
        data: a file, or a folder of them.
        mean_gap_s: mean of the exponential gaps between an answer and the next turn.
        max_output_tokens: None: each recorded answer's approximate length.

    Raises WorkloadError: a setting is wrong, or the file is broken.
    """
    at_least(0, mean_gap_s=mean_gap_s, seed=seed)
    at_least(1, conversations=conversations, max_output_tokens=max_output_tokens)
    skipped: Skipped = [] if skip_bad else None
    plans = [_turns(messages, max_output_tokens) for messages in _read(data, skipped)]
    require(bool(plans), ". ".join(("no dialogue is left", *notes_of(skipped))))
    chosen = list(islice(choose(range(len(plans)), seed), conversations))

    def arrive() -> Iterator[Arriving]:
        for index, (number, at_s) in enumerate(zip(chosen, arrivals.times_s(), strict=False)):
            rng = np.random.default_rng([seed, index])
            later_s = rng.standard_exponential(len(plans[number]) - 1) * mean_gap_s
            gaps_s = [0.0, *later_s.tolist()]
            name = f"{index:05d}-dialogue-{number}"
            yield at_s, PlayedScript(name, _play(name, plans[number], gaps_s))

    turns = sum(len(plans[number]) for number in chosen)
    counts = {"conversations": conversations, "turns": turns}
    return Workload("dialogues", counts, arrive, notes_of(skipped))


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


def _read(path: Path, skipped: Skipped) -> list[list[formats.Message]]:
    found = []
    for recording in recordings(path, skipped):
        with skipping(skipped):
            said = read_json(recording, formats.FORMATS).said(recording.name)
            _check(said, recording.name)
            found.append(said)
    return found


def _check(messages: Sequence[formats.Message], name: str) -> None:
    before: str | None = None
    for number, one in enumerate(messages, 1):
        answers, empty = one.role == "assistant", one.value is None
        wrong = {
            "is the assistant's, with nothing before it": answers and before is None,
            "is the assistant's, as the one before it": one.role == before == "assistant",
            "has neither content nor tool_calls": answers and empty and not one.tool_calls,
            "has no content": empty and not answers,
            "is a system message that is not the first one": one.role == "system" and number > 1,
            "is a tool's, but answers no call": one.role == "tool"
            and before not in ("assistant", "tool"),
        }
        for problem, found in wrong.items():
            require(not found, f"{name}: message {number} {problem}")
        before = one.role
    answered = any(one.role == "assistant" for one in messages)
    require(answered, f"{name} has no assistant message, so there is no turn")


def _turns(
    recorded: Sequence[formats.Message], max_output_tokens: int | None
) -> tuple[RecordedTurn, ...]:
    turns = []
    messages: list[Message] = []
    results: list[str] = []
    for message in recorded:
        if message.role == "assistant":
            limit = max_output_tokens or max(1, formats.estimate(message.whole))
            turns.append(RecordedTurn(tuple(messages), tuple(results), limit))
            messages, results = [], []
        elif message.role == "tool":
            results.append(message.value or "")
        else:
            messages.append({"role": message.role, "content": message.value})
    return tuple(turns)


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
