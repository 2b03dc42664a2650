"""Real agents on the application: the embedded model, the official client, real tools."""

import asyncio
import json
import time
from typing import Any

import httpx
import openai
import pytest

from benchmarks.agent import Transcript, client_complete, make_session, run_agent, score
from conserve.apis import CHAT, MESSAGES, RESPONSES
from tests.engines.applications import MAIN
from tests.engines.metrics import metric

pytestmark = [pytest.mark.anyio, pytest.mark.application(MAIN)]

AGENTS = 6


async def test_agents_do_their_tasks_with_one_handoff_each(
    application: str, client: httpx.AsyncClient
) -> None:
    handoffs = metric("conserve_handoffs_total")
    moves = metric("conserve_moves_total")
    sessions = [make_session(f"integration/{n}", "held-out") for n in range(AGENTS)]

    async def work(number: int) -> tuple[Transcript, list[float]]:
        session = sessions[number]
        headers = {"X-Conversation-Id": f"agent-{number}"}
        complete = client_complete(
            official, "conserve-embedded", max_tokens=256, extra_headers=headers
        )
        ended_s: list[float] = [time.monotonic()]

        async def timed(messages: Any, schemas: Any) -> Any:
            reply = await complete(messages, schemas)
            ended_s.append(time.monotonic())
            return reply

        run = await run_agent(
            timed,
            [
                {"role": "system", "content": session.system},
                {"role": "user", "content": session.tasks[0].question},
            ],
            session.schemas,
            session.toolbox.run,
        )
        return run, ended_s

    async with openai.AsyncOpenAI(
        base_url=application + "/v1", api_key="unused", max_retries=0
    ) as official:
        runs = await asyncio.gather(*map(work, range(AGENTS)))

    scores = [score(s.tasks[0], run) for s, (run, _) in zip(sessions, runs, strict=True)]
    assert sum(one.right_answer for one in scores) >= AGENTS - 2, scores
    for number, (run, ended_s) in enumerate(runs):
        assert len(run.turns) >= 2
        assert all(turn.calls for turn in run.turns[:-1])
        shown = (await client.get(f"{application}/v1/conversations/agent-{number}")).json()
        assert shown["turns"] == len(run.turns)
        # From the first request to the answer, which no call before it is.
        first_s, before_answer_s = ended_s[1], ended_s[-2]
        assert before_answer_s - first_s < shown["ttfet_s"] < ended_s[-1] - ended_s[0]
    assert metric("conserve_handoffs_total") == handoffs + AGENTS
    assert metric("conserve_moves_total") == moves


SUM = {"type": "integer", "minimum": 0, "maximum": 9999}
FORMAT = {
    "type": "object", "properties": {"sum": SUM}, "required": ["sum"], "additionalProperties": False
}  # fmt: skip
NAMED = {"type": "json_schema", "name": "r", "schema": FORMAT}


def asked(path: str, said: str, functions: list[dict[str, Any]], choice: str) -> dict[str, Any]:
    """A request with tools and a format of the answer."""
    user = [{"role": "user", "content": said}]
    if path == MESSAGES:
        kind = {"type": {"required": "any"}.get(choice, choice)}
        tools = [{"name": one["name"], "input_schema": one["parameters"]} for one in functions]
        form = {"type": "json_schema", "schema": FORMAT}
        more = {"output_config": {"format": form}, "max_tokens": 200}
        return {"messages": user, "tools": tools, "tool_choice": kind, **more}
    if path == RESPONSES:
        flat = [{"type": "function", **one} for one in functions]
        more = {"text": {"format": NAMED}, "max_output_tokens": 200}
        return {"input": user, "tools": flat, "tool_choice": choice, "store": False, **more}
    nested = [{"type": "function", "function": one} for one in functions]
    form = {"type": "json_schema", "json_schema": NAMED}
    more = {"response_format": form, "max_tokens": 200}
    return {"messages": user, "tools": nested, "tool_choice": choice, **more}


def answered(path: str, told: list[Any]) -> tuple[list[str], str]:
    """The tools that events call, or an answer in one piece, and its text."""
    if path == CHAT:
        parts = [one.get("delta") or one.get("message") or {} for e in told for one in e["choices"]]
        calls = [call["function"] for part in parts for call in part.get("tool_calls") or ()]
        return [n for one in calls if (n := one.get("name"))], parts[0].get("content") or ""
    if path == MESSAGES:
        blocks = told[0].get("content") or [e["content_block"] for e in told if "index" in e
                                            and e.get("content_block")]  # fmt: skip
        texts = [one["text"] for one in blocks if one["type"] == "text"]
        return [one["name"] for one in blocks if one["type"] == "tool_use"], "".join(texts)
    items = (told[-1].get("response") or told[0])["output"]
    texts = [part["text"] for one in items for part in one.get("content") or ()]
    return [one["name"] for one in items if one["type"] == "function_call"], "".join(texts)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_an_agent_whose_answers_have_a_format_calls_its_tools(
    application: str, client: httpx.AsyncClient, path: str, stream: bool
) -> None:
    session = make_session("integration/0", "held-out")
    functions = [schema["function"] for schema in session.schemas]
    task, first = session.tasks[0].question, session.tasks[0].calls[0].name
    for said, choice in (
        (task, "auto"), (task, "required"), (task, "none"), ("hello there", "auto")
    ):  # fmt: skip
        body = {**asked(path, said, functions, choice), "stream": stream, "temperature": 0}
        reply = await client.post(application + path, json={"model": "conserve-embedded", **body})
        assert reply.status_code == 200, reply.text
        lines = reply.text.splitlines() if stream else [f"data: {reply.text}"]
        told = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        calls, text = answered(path, told)
        if said == task and choice != "none":
            # Where it must call, its first token is a call's, so it may take another tool.
            assert calls == [first] if choice == "auto" else calls
        else:
            assert not calls
            assert stream or 0 <= json.loads(text)["sum"] <= 9999
