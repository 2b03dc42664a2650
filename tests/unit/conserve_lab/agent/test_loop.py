"""The agent's loop, with models that are scripted."""

import json
from collections.abc import Sequence
from typing import Any

import httpx
import openai

from conserve_lab.agent import (
    Call,
    Message,
    Reply,
    Schema,
    client_complete,
    make_session,
    run_agent,
    score,
)
from conserve_lab.agent.tasks import call_message

SESSION = make_session(2, "held-out")
TASK = SESSION.tasks[0]
QUESTION: list[Message] = [
    {"role": "system", "content": SESSION.system},
    {"role": "user", "content": TASK.question},
]


class Scripted:
    """A model that says what it was given, one message a turn."""

    def __init__(self, *messages: Message) -> None:
        self.messages = list(messages)
        self.asked: list[int] = []

    async def __call__(self, messages: Sequence[Message], schemas: Sequence[Schema]) -> Reply:
        self.asked.append(len(messages))
        return Reply(self.messages.pop(0), {"asked": len(messages)})


def _script(calls: Sequence[Call], answer: str) -> Scripted:
    messages = [call_message(call, "", f"c{n}") for n, call in enumerate(calls)]
    return Scripted(*messages, {"role": "assistant", "content": answer})


async def test_a_right_run() -> None:
    model = _script(TASK.calls, TASK.answer)
    run = await run_agent(model, QUESTION, SESSION.schemas, SESSION.toolbox.run)
    turns = run.turns
    assert len(turns) == len(TASK.calls) + 1
    assert run.calls == list(TASK.calls)
    said = [json.loads(m["content"])["result"] for m in run.messages if m["role"] == "tool"]
    assert tuple(said) == TASK.results
    # The history only grows: two messages a turn.
    assert model.asked == [2 + 2 * n for n in range(len(turns))]
    assert [turn.reply.info["asked"] for turn in turns] == model.asked
    assert run.messages[:2] == QUESTION
    assert run.answer == TASK.answer
    result = score(TASK, run)
    assert (result.right_calls, result.right_answer) == (result.calls, True)


async def test_wrong_calls_are_told_and_counted() -> None:
    wrong = Call("no_such_tool", {})
    run = await run_agent(
        _script([wrong, *TASK.calls[1:]], "I do not know."),
        QUESTION, SESSION.schemas, SESSION.toolbox.run,
    )  # fmt: skip
    assert "no tool no_such_tool" in json.loads(run.messages[3]["content"])["error"]
    result = score(TASK, run)
    assert (result.right_calls, result.right_answer) == (result.calls - 1, False)


async def test_an_agent_without_end_is_stopped() -> None:
    run = await run_agent(
        _script([TASK.calls[0]] * 9, "never said"),
        QUESTION, SESSION.schemas, SESSION.toolbox.run, max_turns=3,
    )  # fmt: skip
    assert len(run.turns) == 3
    assert run.answer is None
    assert not score(TASK, run).right_answer


async def test_the_official_client_is_asked_greedily() -> None:
    """Tools, options and history go out; headers, usage and the calls come back, put together."""
    call = call_message(TASK.calls[0], "So.", "c1")["tool_calls"][0]
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        {"content": "So"},
        {"content": "."},
        {"tool_calls": [{"index": 0, "id": "c1", "type": "function", "function": {"name": name}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": arguments[:5]}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": arguments[5:]}}]},
    ]
    choices: list[list[dict[str, Any]]] = [[{"index": 0, "delta": delta}] for delta in deltas]
    choices[-1][0]["finish_reason"] = "tool_calls"
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    events = [{"choices": choice} for choice in choices] + [{"choices": [], "usage": usage}]
    common = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    lines = [f"data: {json.dumps(common | event)}\n\n" for event in events]
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        headers = {"content-type": "text/event-stream", "x-conversation-id": "a"}
        return httpx.Response(200, headers=headers, text="".join([*lines, "data: [DONE]\n\n"]))

    transport: Any = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    async with openai.AsyncOpenAI(
        base_url="http://unused/v1", api_key="unused", http_client=transport
    ) as client:
        reply = await client_complete(client, "m", max_tokens=9)(QUESTION, SESSION.schemas)
    sent = json.loads(seen[0].content)
    assert sent["messages"] == QUESTION
    assert sent["tools"] == list(SESSION.schemas)
    assert (sent["model"], sent["temperature"], sent["max_tokens"]) == ("m", 0, 9)
    assert reply.message == call_message(TASK.calls[0], "So.", "c1")
    assert reply.info["headers"]["x-conversation-id"] == "a"
    assert reply.info["usage"] == usage
    assert reply.info["finish_reason"] == "tool_calls"
    assert reply.info["ttft_s"] > 0
