"""Real agents on the application: the embedded model, the official client, real tools."""

import asyncio
import time
from typing import Any

import httpx
import openai
import pytest

from benchmarks.agent import Transcript, client_complete, make_session, run_agent, score
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
