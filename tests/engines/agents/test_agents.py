"""Real agents on the application: the embedded model, the official client, real tools."""

import asyncio
import json
import time
from typing import Any

import httpx
import openai
import pytest

from conserve.apis import CHAT, MESSAGES, RESPONSES
from conserve.recognition.apis import answers_of
from conserve.recognition.normal import normalised
from conserve_lab.agent import Transcript, client_complete, make_session, run_agent, score
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


VALUE = {"type": "integer", "minimum": 0, "maximum": 9999}
FORMAT = {"type": "object", "properties": {"sum": VALUE}, "required": ["sum"]}


def asked(path: str, said: str, functions: list[Any], choice: str) -> dict[str, Any]:
    """Fields of a request with tools and a format. ``choice`` is a chat's, or a tool's name."""
    chosen: Any = choice
    is_named, user = choice in [one["name"] for one in functions], {"role": "user", "content": said}
    form = {"type": "json_schema", "name": "r", "schema": FORMAT | {"additionalProperties": False}}
    tools = [{"type": "function", **one} for one in functions]
    if path == RESPONSES:
        chosen = {"type": "function", "name": choice} if is_named else choice
        body = {"input": [user], "text": {"format": form}, "store": False, "max_output_tokens": 200}
    elif path == MESSAGES:
        renamed = {"parameters": "input_schema"}
        tools = [{renamed.get(name, name): one[name] for name in one} for one in functions]
        kind = {"auto": "auto", "none": "none", "required": "any"}.get(choice, "tool")
        chosen = {"type": kind, **({"name": choice} if is_named else {})}
        body = {"messages": [user], "output_config": {"format": form}, "max_tokens": 200}
    else:
        tools = [{"type": "function", "function": one} for one in functions]
        chosen = {"type": "function", "function": {"name": choice}} if is_named else choice
        wanted = {"type": "json_schema", "json_schema": form}
        body = {"messages": [user], "response_format": wanted, "max_tokens": 200}
    return {**body, "tools": tools, "tool_choice": chosen}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_an_agent_whose_answers_have_a_format_calls_its_tools(
    application: str, client: httpx.AsyncClient, path: str, stream: bool
) -> None:
    session = make_session("integration/0", "held-out")
    functions = [schema["function"] for schema in session.schemas]
    task, first = session.tasks[0], session.tasks[0].calls[0]
    # What the model is asked, what it may call, and whether it calls.
    for said, choice, calls in (
        (task.question, "auto", [[first.name, [first.arguments]]]),
        (task.question, "required", None),
        (task.question, first.name, None),
        (task.question, "none", []),
        ("hello there", "auto", []),
    ):
        body = {"model": "conserve-embedded", "temperature": 0, "stream": stream}
        body |= asked(path, said, functions, choice)
        reply = await client.post(application + path, json=body)
        assert reply.status_code == 200, reply.text
        (answer,) = answers_of(path, [reply.content], stream)
        _, texts, called = normalised(answer)
        assert called == calls if calls is not None else called, (said, choice, texts)
        if choice == first.name:
            assert [name for name, _ in called] == [choice]
        assert called or 0 <= json.loads(texts[0])["sum"] <= 9999
