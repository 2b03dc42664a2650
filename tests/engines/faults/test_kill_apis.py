"""``kill -9`` on a decoder in the middle of a stream of Messages, and of Responses."""

import asyncio
import json
import random
from typing import Any

import httpx
import pytest

from conserve.apis import MESSAGES, RESPONSES, form_of
from tests.engines.applications import MAIN
from tests.engines.client import TIMEOUT_S, chat, engines, last_turn, prose
from tests.engines.lone import LONE_PORT
from tests.engines.metrics import metric
from tests.engines.processes import kill
from tests.engines.stage import Stage

pytestmark = [pytest.mark.anyio, pytest.mark.application(MAIN, last=True)]

TOKENS = 400


def _body(path: str, prompt: str) -> dict[str, Any]:
    said = [{"role": "user", "content": prompt}]
    body: dict[str, Any] = {"model": "conserve-embedded", "stream": True, "temperature": 0}
    if path == MESSAGES:
        return {**body, "messages": said, "max_tokens": TOKENS}
    return {**body, "input": said, "max_output_tokens": TOKENS, "ignore_eos": True}


@pytest.mark.full
@pytest.mark.parametrize("path", [pytest.param(MESSAGES, marks=pytest.mark.long), RESPONSES])
async def test_a_stream_goes_on_at_another_decoder(
    application: str, stage: Stage, client: httpx.AsyncClient, rng: random.Random, path: str
) -> None:
    """Its events are those of one answer, ids and numbers included, and its text is that answer."""
    stage.wait_for_lone()
    prompt = prose(rng, 300)
    continued = metric("conserve_stream_moves_total")
    raw, lost, decoder = "", "", ""
    async with client.stream("POST", application + path, json=_body(path, prompt)) as response:
        assert response.status_code == 200
        decoder = response.headers["x-conserve-decoder"]
        async for part in response.aiter_text():
            raw += part
            if not lost and raw.count("delta\ndata: ") >= 5:
                lost = decoder
                kill(next(one["pid"] for one in engines("decoder") if one["id"] == lost))
    events = [json.loads(event.partition("data: ")[2]) for event in raw.split("\n\n") if event]
    assert metric("conserve_stream_moves_total") == continued + 1
    assert raw.split("\n\n")[-2].encode().startswith(form_of(path).ends)
    lone = await chat(
        client,
        [{"role": "user", "content": prompt}],
        tokens=TOKENS,
        url=f"http://127.0.0.1:{LONE_PORT}",
        ignore_eos=path == RESPONSES,
    )
    kinds = [event["type"] for event in events]
    if path == MESSAGES:
        text = "".join(event["delta"].get("text", "") for event in events
                       if event["type"] == "content_block_delta")  # fmt: skip
        assert kinds.count("message_start") == kinds.count("content_block_start") == 1
    else:
        deltas = [event for event in events if event["type"] == "response.output_text.delta"]
        text = "".join(event["delta"] for event in deltas)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        (item,) = [
            event["item"] for event in events if event["type"] == "response.output_item.added"
        ]
        assert {event["item_id"] for event in deltas} == {item["id"]}
        told = [event["response"] for event in events if "response" in event]
        assert len({(one["id"], one["created_at"]) for one in told}) == 1
        assert told[-1]["output"][0]["content"][0]["text"] == text
        # The decoder that has gone on keeps it under the ids that the client knows.
        assert told[-1]["output"][0]["id"] == item["id"]
        kept = await client.get(f"{application}{RESPONSES}/{told[-1]['id']}")
        assert kept.json()["output"] == told[-1]["output"]
    assert text == lone.content
    # The next turn is recognised by it, at the decoder that has gone on.
    more = [{"role": "user", "content": prompt}, {"role": "assistant", "content": text},
            {"role": "user", "content": "go on"}]  # fmt: skip
    reply = await asyncio.wait_for(chat(client, more), TIMEOUT_S)
    assert reply.conversation == response.headers["x-conversation-id"]
    assert reply.decoder != lost
    stats = await last_turn(client, reply.conversation)
    assert stats["decoder_cached_tokens"] >= 300 - 128
    await asyncio.to_thread(stage.wait_until_whole)
