"""Clients that break their own prefixes, and what `GET /v1/cache` says of them."""

import random
from typing import Any

import httpx
import pytest

from tests.engines.applications import ONE, URL
from tests.engines.client import Agent, engines, prose
from tests.engines.metrics import exposed, metric

pytestmark = [pytest.mark.anyio, pytest.mark.application(ONE)]


def computed() -> float:
    """Return the prompt tokens that the engine says it has computed."""
    text = exposed(engines()[0]["url"])
    return metric("vllm:prompt_tokens_by_source_total", text, source="local_compute")


async def spent(agent: Agent, content: str, **options: Any) -> float:
    """Send a turn; return the prompt tokens that were computed for it."""
    before, named = computed(), {"User-Agent": f"{agent.id}/1.0 (a test)"}
    agent.messages.append({"role": "user", "content": content})
    reply = await agent.ask(tokens=8, headers=named, **options)
    assert reply.status == 200, reply.body
    agent.messages.append({"role": "assistant", "content": reply.content})
    return computed() - before


async def told(agent: Agent) -> Any:
    """End a conversation; returns the tokens of its client by cause."""
    answer = await agent.client.get(f"{URL}/v1/cache")
    await agent.client.delete(f"{URL}/v1/conversations/{agent.id}")
    return answer.json()["clients"][agent.id]


async def test_clients_that_break_their_prefixes_are_told_how_and_what_that_costs(
    application: str, client: httpx.AsyncClient, rng: random.Random
) -> None:
    dater, schemer, editor, sleeper = (
        Agent(client, name, [{"role": "system", "content": prose(rng, 160)}])
        for name in ("dater", "schemer", "editor", "sleeper")
    )
    text, turns = dater.messages[0]["content"], []
    for second in range(5):
        dater.messages[0]["content"] = f"It is 12:00:0{second}. {text}"
        turns.append(await spent(dater, prose(rng, 40)))
    wanted = {"first": turns[0], "rotating": sum(turns[1:])}
    assert await told(dater) == pytest.approx(wanted, rel=0.02)

    turns = []
    for about in ("a path", "a path", "another", "another"):
        schema = {"type": "object", "properties": {"path": {"type": "string", "title": about}}}
        tool = {"type": "function", "function": {"name": "open", "parameters": schema}}
        turns.append(await spent(schemer, prose(rng, 40), tools=[tool]))
    wanted = {"first": turns[0], "append": turns[1] + turns[3], "tools": turns[2]}
    assert await told(schemer) == pytest.approx(wanted, rel=0.02)

    turns = [await spent(editor, prose(rng, 150)) for _ in range(3)]
    editor.messages[3] = {"role": "user", "content": prose(rng, 150)}
    turns.append(await spent(editor, prose(rng, 40)))
    wanted = {"first": turns[0], "append": turns[1] + turns[2], "message": turns[3]}
    assert await told(editor) == pytest.approx(wanted, rel=0.02)

    first = await spent(sleeper, prose(rng, 300))
    # The engine computes what the table does not know of.
    for _ in range(3):
        body = {"model": "conserve-embedded", "prompt": prose(rng, 1500), "max_tokens": 1}
        assert (await client.post(f"{engines()[0]['url']}/v1/completions", json=body)).is_success
    again = await spent(sleeper, prose(rng, 40))
    causes = await told(sleeper)
    assert causes["evicted"] > 5 * causes["append"] > 0
    found = {"first": causes["first"], "again": causes["evicted"] + causes["append"]}
    assert found == pytest.approx({"first": first, "again": again}, rel=0.02)
