"""Anthropic's Messages API, by its official client, as Claude Code uses it."""

import json
import random
from typing import Any

import anthropic
import httpx
import pytest

from tests.engines.applications import MAIN
from tests.engines.client import BLOCK_TOKENS, chat, last_turn, lone_answer, prose, require_reuse
from tests.engines.lone import LONE_PORT
from tests.engines.stage import Stage

pytestmark = [pytest.mark.anyio, pytest.mark.application(MAIN)]

MODEL = "conserve-embedded"
HELLO = [{"role": "user", "content": "hello"}]
TOOL = {
    "name": "look_up",
    "input_schema": {
        "type": "object",
        "properties": {"on": {"type": "boolean"}},
        "required": ["on"],
    },
}


@pytest.fixture
async def official(application: str) -> Any:
    async with anthropic.AsyncAnthropic(
        base_url=application, api_key="unused", max_retries=0
    ) as official:
        yield official.messages.with_raw_response


async def ask(official: Any, messages: Any, stream: bool = False, **more: Any) -> Any:
    """A turn's message, and the headers that came with it."""
    asked = {"model": MODEL, "max_tokens": 24, "messages": messages, **more}
    raw = await official.create(**asked, stream=stream, extra_body={"temperature": 0})
    return await raw.parse(), raw.headers


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


async def test_a_conversation_without_a_name(
    official: Any, client: httpx.AsyncClient, stage: Stage, rng: random.Random
) -> None:
    """One handoff, then one decoder that has it all; in the middle it goes on as a chat."""
    stage.wait_for_lone()
    messages: list[Any] = [{"role": "user", "content": prose(rng, 700)}]
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=%s;"},
        {"type": "text", "text": "You are brief."},
    ]
    seen = []
    for turn in range(4):
        system[0]["text"] = f"x-anthropic-billing-header: cc_version=2.1; cch={turn};"
        told = [{"role": "system", "content": "You are brief."}, *messages]
        expected = await lone_answer(client, told, 24)
        if turn == 2:
            reply = await chat(client, told)
            answer, headers = reply.content, reply.headers
        else:
            message, headers = await ask(official, messages, system=system)
            answer = text_of(message)
            assert message.stop_reason in ("max_tokens", "end_turn")
        assert answer == expected
        stats = await last_turn(client, headers["x-conversation-id"])
        seen.append((headers["x-conversation-id"], headers["x-conserve-decoder"], stats))
        messages += [
            {"role": "assistant", "content": [{"type": "text", "text": answer}]},
            {"role": "user", "content": f"go on {turn}"},
        ]
    require_reuse(seen)


async def test_a_stream(official: Any, client: httpx.AsyncClient, rng: random.Random) -> None:
    """Its events are Anthropic's, it says what a body does, and it is recognised by that."""
    messages: list[Any] = [{"role": "user", "content": prose(rng, 300)}]
    whole, first = await ask(official, messages)
    stream, headers = await ask(official, messages, stream=True)
    events = [event async for event in stream]
    assert events[0].type == "message_start"
    assert events[-1].type == "message_stop"
    assert not any(event.type == "error" for event in events)
    text = "".join(
        event.delta.text
        for event in events
        if event.type == "content_block_delta" and event.delta.type == "text_delta"
    )
    assert text == text_of(whole)
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]
    _, again = await ask(official, messages)
    known = {first["x-conversation-id"], headers["x-conversation-id"]}
    assert again["x-conversation-id"] in known


async def test_a_stream_says_the_same_of_caches_at_its_beginning_and_at_its_end(
    application: str, official: Any, client: httpx.AsyncClient, rng: random.Random
) -> None:
    """In a first turn, which a prefiller has computed, and in one that finds its history."""
    messages: list[Any] = [{"role": "user", "content": prose(rng, 500)}]
    for turn in range(2):
        stream, headers = await ask(official, messages, stream=True)
        events = [event async for event in stream]
        stats = await last_turn(client, headers["x-conversation-id"])
        start, end = events[0].message, events[-2]
        read = start.usage.cache_read_input_tokens
        # What a prefiller has just computed was in no cache.
        assert read == (stats["decoder_cached_tokens"] if turn else 0)
        assert bool(read) is bool(turn)
        for usage in (start.usage, end.usage):
            created = usage.cache_creation_input_tokens
            assert usage.cache_read_input_tokens == read
            assert created == start.usage.cache_creation_input_tokens
            assert usage.input_tokens + read + created == stats["prompt_tokens"]
        assert start.id.startswith("msg_")
        assert end.delta.model_fields_set >= {"stop_reason", "stop_sequence"}
        assert end.delta.stop_sequence is None
        text = "".join(event.delta.text for event in events if event.type == "content_block_delta")
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]
    whole = {"model": MODEL, "max_tokens": 2, "messages": HELLO}
    body = (await client.post(application + "/v1/messages", json=whole)).json()
    assert body["id"].startswith("msg_")
    assert body["stop_sequence"] is None


@pytest.mark.parametrize("stream", [False, True])
async def test_a_last_message_of_the_assistants_is_continued(
    official: Any, client: httpx.AsyncClient, stage: Stage, rng: random.Random, stream: bool
) -> None:
    """As by vLLM's chats that ask for it; and the next turn goes on with what came of it."""
    stage.wait_for_lone()
    told: list[Any] = [{"role": "user", "content": prose(rng, 400)}]
    begun = "open the file and"
    messages = [*told, {"role": "assistant", "content": begun}]
    lone = f"http://127.0.0.1:{LONE_PORT}"
    continued: Any = {"continue_final_message": True, "add_generation_prompt": False}
    expected = await chat(client, messages, url=lone, **continued)
    closed = await chat(client, messages, url=lone)
    answer, first = await ask(official, messages, stream)
    if stream:
        events = [event async for event in answer]
        text = "".join(event.delta.text for event in events if event.type == "content_block_delta")
    else:
        text = text_of(answer)
    assert text == expected.content != closed.content
    before = await last_turn(client, first["x-conversation-id"])
    messages = [
        *told,
        {"role": "assistant", "content": begun + text},
        {"role": "user", "content": "go on"},
    ]
    after, second = await ask(official, messages)
    assert text_of(after) == await lone_answer(client, messages, 24)
    assert second["x-conversation-id"] == first["x-conversation-id"]
    assert second["x-conserve-decoder"] == first["x-conserve-decoder"]
    stats = await last_turn(client, second["x-conversation-id"])
    assert stats["lmcache_tokens"] == 0
    assert stats["decoder_cached_tokens"] >= before["prompt_tokens"] - BLOCK_TOKENS


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_is_called_and_its_result_told(
    application: str, official: Any, client: httpx.AsyncClient, rng: random.Random, stream: bool
) -> None:
    messages: list[Any] = [{"role": "user", "content": prose(rng, 200)}]
    choice = {"type": "tool", "name": "look_up"}
    options = {"tools": [TOOL], "max_tokens": 200}
    answer, headers = await ask(official, messages, stream, tool_choice=choice, **options)
    if stream:
        events = [event async for event in answer]
        (start,) = [
            event.content_block
            for event in events
            if event.type == "content_block_start" and event.content_block.type == "tool_use"
        ]
        text = "".join(
            event.delta.partial_json
            for event in events
            if event.type == "content_block_delta" and event.delta.type == "input_json_delta"
        )
        call = {"id": start.id, "name": start.name, "input": json.loads(text)}
    else:
        (block,) = [block for block in answer.content if block.type == "tool_use"]
        call = {"id": block.id, "name": block.name, "input": block.input}
    assert call["name"] == "look_up"
    assert isinstance(call["input"]["on"], bool)
    shown = await client.get(f"{application}/v1/conversations/{headers['x-conversation-id']}")
    # A call is no answer yet to who waits for one.
    assert shown.json()["ttfet_s"] is None
    messages += [
        {"role": "assistant", "content": [{"type": "tool_use", **call}]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": call["id"], "content": "it is on"}],
        },
    ]
    _, again = await ask(official, messages, tool_choice={"type": "none"}, **options)
    assert again["x-conversation-id"] == headers["x-conversation-id"]
    assert again["x-conserve-decoder"] == headers["x-conserve-decoder"]


async def test_a_stream_that_is_cut_in_a_call_says_so(official: Any) -> None:
    schema = {"type": "object", "properties": {"text": {"enum": ["write " * 40]}}}
    options: Any = {
        "tools": [{"name": "write", "input_schema": schema | {"required": ["text"]}}],
        "tool_choice": {"type": "tool", "name": "write"},
        "max_tokens": 40,
    }
    answer, _ = await ask(official, [{"role": "user", "content": "hello"}], True, **options)
    events = [event async for event in answer]
    assert [e.content_block.name for e in events if e.type == "content_block_start"] == ["write"]
    assert [e.delta.stop_reason for e in events if e.type == "message_delta"] == ["max_tokens"]


async def test_tokens_are_counted_as_the_engine_counts_them(
    application: str, official: Any, client: httpx.AsyncClient, rng: random.Random
) -> None:
    asked = {
        "model": MODEL,
        "messages": [{"role": "user", "content": prose(rng, 100)}],
        "system": "Be brief.",
        "tools": [TOOL],
    }
    counted = (await client.post(application + "/v1/messages/count_tokens", json=asked)).json()
    message, headers = await ask(official, **asked)
    stats = await last_turn(client, headers["x-conversation-id"])
    assert counted["input_tokens"] == stats["prompt_tokens"]
    # What was put into a cache, or read from one, is not among them there.
    usage = message.usage
    cached = (usage.cache_creation_input_tokens or 0) + (usage.cache_read_input_tokens or 0)
    assert stats["prompt_tokens"] == usage.input_tokens + cached


@pytest.mark.parametrize(
    ("body", "status", "kind", "said"),
    [
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"messages": HELLO, "model": "claude"}, 404, "not_found_error", MODEL),
        ({"messages": HELLO, "max_tokens": -1}, 400, "invalid_request_error", "max_tokens"),
        ({"messages": HELLO}, 400, "invalid_request_error", "max_tokens"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_have_anthropics_shape(
    application: str,
    client: httpx.AsyncClient,
    body: Any,
    status: int,
    kind: str,
    said: str,
    stream: bool,
) -> None:
    reply = await client.post(application + "/v1/messages", json={**body, "stream": stream})
    assert reply.status_code == status, reply.text
    told = reply.json()
    assert told["type"] == "error"
    assert told["error"]["type"] == kind
    assert said in told["error"]["message"]
