"""The agent's loop: ask the model, run the tools that it calls, until it answers.

With the official client, against any server of OpenAI's API that parses tool calls::

    client = openai.AsyncOpenAI(base_url="http://127.0.0.1:8000/v1", api_key="unused")
    complete = client_complete(client, "conserve-embedded", extra_headers={...})
    transcript = await run_agent(complete, messages, schemas, toolbox.run)
"""

import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from conserve_lab.agent.tasks import Message, Task, is_right
from conserve_lab.agent.tools import Call, Schema, ToolError, Value

MAX_TURNS = 12


@dataclass(frozen=True, slots=True)
class Reply:
    """A model's reply: the message, as it goes into the next request, and what else the server
    told.
    """

    message: Message
    info: Mapping[str, Any] = field(default_factory=dict)


# Takes the messages and the tools, and returns the model's reply.
Complete = Callable[[Sequence[Message], Sequence[Schema]], Awaitable[Reply]]
# Carries out a call, and returns a value, or the parts of a message; raises ToolError for a call
# that it refuses.
RunTool = Callable[[Call], Value | list[Message]]


@dataclass(frozen=True, slots=True)
class Turn:
    """One reply, its calls (None for arguments that are no JSON object), and what the model is
    told.
    """

    reply: Reply
    calls: tuple[Call | None, ...]
    results: tuple[str | list[Message], ...]


@dataclass(slots=True)
class Transcript:
    """An agent's run: all messages, and the answer, None if it was stopped before it gave one."""

    messages: list[Message]
    turns: list[Turn] = field(default_factory=list)
    answer: str | None = None

    @property
    def calls(self) -> list[Call | None]:
        return [call for turn in self.turns for call in turn.calls]


@dataclass(frozen=True, slots=True)
class Score:
    """Calls that a task takes, those that were made right and in their place, and whether the
    answer is.
    """

    calls: int
    right_calls: int
    right_answer: bool


async def run_agent(
    complete: Complete,
    messages: Sequence[Message],
    schemas: Sequence[Schema],
    run_tool: RunTool,
    *,
    max_turns: int = MAX_TURNS,
) -> Transcript:
    """Have a model work until it answers without a call, or ``max_turns`` are over."""
    transcript = Transcript(list(messages))
    for _ in range(max_turns):
        reply = await complete(transcript.messages, schemas)
        calls, results = go_on(transcript.messages, reply.message, run_tool)
        transcript.turns.append(Turn(reply, tuple(calls), tuple(results)))
        if not calls:
            transcript.answer = str(reply.message.get("content") or "")
            break
    return transcript


def go_on(
    messages: list[Message], message: Message, run_tool: RunTool
) -> tuple[list[Call | None], list[str | list[Message]]]:
    """Append a model's message and its tools' results; returns the calls, and what the model is
    told.
    """
    messages.append(message)
    calls: list[Call | None] = []
    results: list[str | list[Message]] = []
    for asked in message.get("tool_calls") or []:
        call, result = _carried_out(run_tool, asked["function"])
        calls.append(call)
        results.append(result)
        messages.append({"role": "tool", "tool_call_id": asked["id"], "content": result})
    return calls, results


def score(task: Task, transcript: Transcript) -> Score:
    pairs = zip(task.calls, transcript.calls, strict=False)
    return Score(
        calls=len(task.calls),
        right_calls=sum(expected == made for expected, made in pairs),
        right_answer=transcript.answer is not None and is_right(task, transcript.answer),
    )


def client_complete(
    client: Any, model: str, on_begin: Callable[[Any], None] | None = None, **options: Any
) -> Complete:
    """Ask through ``openai.AsyncOpenAI``, in streams, greedily unless the options say otherwise.

    Args:
        on_begin: called with the HTTP response at the first piece of an answer.
        options: passed to ``chat.completions.create``: ``extra_headers``, ``max_tokens``, ...

    Returns:
        A function whose replies' ``info`` has ``headers``, ``usage`` (a dictionary),
        ``finish_reason``, ``retries``, and ``ttft_s``, the time to the first piece of the answer.
    """
    sent = {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}, **options}

    async def complete(messages: Sequence[Message], schemas: Sequence[Schema]) -> Reply:
        tools = {"tools": list(schemas)} if schemas else {}
        started_s = time.perf_counter()
        raw = await client.chat.completions.with_raw_response.create(
            model=model, messages=list(messages), **tools, **sent
        )
        info: dict[str, Any] = {
            "headers": dict(raw.headers),
            "usage": {},
            "retries": raw.retries_taken,
        }
        content = ""
        calls: dict[int, Message] = {}
        async for chunk in raw.parse():
            if chunk.usage:
                info["usage"] = chunk.usage.model_dump(exclude_none=True)
            for choice in chunk.choices:
                if choice.finish_reason:
                    info["finish_reason"] = choice.finish_reason
                if "ttft_s" not in info and (choice.delta.content or choice.delta.tool_calls):
                    info["ttft_s"] = time.perf_counter() - started_s
                    if on_begin is not None:
                        on_begin(raw.http_response)
                content += choice.delta.content or ""
                for part in choice.delta.tool_calls or []:
                    _append(calls, part)
        message: Message = {"role": "assistant", "content": content}
        if calls:
            message["tool_calls"] = [call for _, call in sorted(calls.items())]
        return Reply(message, info)

    return complete


def _append(calls: dict[int, Message], part: Any) -> None:
    """Add a piece of a streamed call: the first has its id and name, later ones arguments."""
    empty = {"id": part.id, "type": "function", "function": {"name": "", "arguments": ""}}
    function = calls.setdefault(part.index, empty)["function"]
    if part.function is not None:
        function["name"] += part.function.name or ""
        function["arguments"] += part.function.arguments or ""


def _carried_out(run_tool: RunTool, function: Message) -> tuple[Call | None, str | list[Message]]:
    try:
        arguments = json.loads(function["arguments"])
    except ValueError as error:
        return None, json.dumps({"error": f"the arguments are no JSON: {error}"})
    if not isinstance(arguments, dict):
        return None, json.dumps({"error": "the arguments are no JSON object"})
    call = Call(str(function["name"]), arguments)
    try:
        result = run_tool(call)
    except ToolError as error:
        return call, json.dumps({"error": str(error)})
    return call, result if isinstance(result, list) else json.dumps({"result": result})
