"""Requests that cost the most, beside streams: each is answered, and no stream is cut."""

import asyncio
import json
import random

import httpx
import pytest

from conserve import budget
from conserve.settings import Settings
from experiments.unkind import Unkind, chat_of, kinds, schema_of, varied
from tests.engines.applications import MAIN
from tests.engines.client import chat, prose

pytestmark = [pytest.mark.anyio, pytest.mark.full, pytest.mark.application(MAIN)]

_TOOLS = [{"type": "function", "function": {"name": f"f{n}"}} for n in range(512)]
KINDS: dict[str, Unkind] = {
    **kinds(Settings()),
    "slowest regex": chat_of(structured_outputs={"regex": "(a|aa|aaa){1,9999}b"}),
    "most alternatives": schema_of(
        oneOf=[{"type": "object", "required": [str(n)]} for n in range(500)]
    ),
    "most tools": chat_of(tools=_TOOLS, tool_choice="required"),
    "most stops": chat_of(stop=["ab" * 100 + str(n) for n in range(64)], max_tokens=16),
    "most biases": chat_of(logit_bias={str(n): 1 for n in range(1024)}, max_tokens=16),
    "most choices": chat_of(n=budget.MOST_CHOICES),
    "longest word": chat_of(messages=[{"role": "user", "content": "w" * 400_000}]),
    "most templates": chat_of(chat_template_kwargs={"a": ["b" * 100] * 8000}),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_streams_are_whole_beside_what_costs_the_most(
    application: str, client: httpx.AsyncClient, rng: random.Random, kind: str
) -> None:
    path, body, _ = unkind = KINDS[kind]
    said = [[{"role": "user", "content": prose(rng, 100)}] for _ in range(2)]
    streams = [asyncio.create_task(chat(client, one, tokens=200, stream=True)) for one in said]
    headers = {"Content-Type": "application/json"}
    for _ in range(2):
        own = None if body is None else varied(unkind, body)
        method = "GET" if body is None else "POST"
        reply = await client.request(method, application + path, content=own, headers=headers)
        # Served, or refused by a sentence.
        assert reply.status_code in (200, 400, 413), reply.text
        assert reply.status_code == 200 or json.loads(reply.content)["error"]["message"]
    for stream in streams:
        events = (await stream).body
        assert events[-1]["choices"][0]["finish_reason"] == "length"
