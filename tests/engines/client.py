"""What a client does: conversations turn by turn, and what can be asked about them."""

import asyncio
import itertools
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import httpx

from tests.engines.applications import URL
from tests.engines.lone import LONE_PORT

Message = dict[str, Any]

TIMEOUT_S = 180.0
BLOCK_TOKENS = 128
_WORDS = (
    *("open", "close", "read", "write", "file", "class", "return", "import", "value", "index"),
    *("print", "while", "yield", "token", "block", "cache", "decoder", "turn", "prompt", "answer"),
    *("agent", "tool", "result", "error", "count", "length", "prefix", "batch", "step", "open"),
)


def prose(rng: random.Random, words: int) -> str:
    """Draw prose of ``words`` words, of about a token each."""
    return " ".join(rng.choice(_WORDS) for _ in range(words))


@dataclass
class Reply:
    """A turn's outcome as a client has it."""

    status: int
    headers: httpx.Headers
    body: Any
    content: str = ""
    # From the request to each event, if streamed.
    after_s: list[float] = field(default_factory=list)

    @property
    def gaps_ms(self) -> list[float]:
        return [1e3 * (after - before) for before, after in itertools.pairwise(self.after_s)]

    @property
    def conversation(self) -> str:
        return str(self.headers["x-conversation-id"])

    @property
    def decoder(self) -> str:
        return str(self.headers["x-conserve-decoder"])


@dataclass
class Agent:
    """A client that keeps a conversation's messages and echoes answers as it got them."""

    client: httpx.AsyncClient
    id: str | None = None
    messages: list[Message] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)
    stats: list[dict[str, int]] = field(default_factory=list)

    async def say(
        self,
        content: str | list[Message],
        *,
        tokens: int = 24,
        stream: bool = False,
        **options: Any,
    ) -> Reply:
        """Append a message, have it answered, append the answer; fails on any error."""
        self.messages.append({"role": "user", "content": content})
        reply = await self.ask(tokens=tokens, stream=stream, **options)
        assert reply.status == 200, reply.body
        self.messages.append({"role": "assistant", "content": reply.content})
        self.replies.append(reply)
        self.stats.append(await last_turn(self.client, reply.conversation))
        return reply

    async def ask(self, *, tokens: int = 24, stream: bool = False, **options: Any) -> Reply:
        """Send the messages as they are; options as ``chat`` has them."""
        return await chat(
            self.client, self.messages, self.id, tokens=tokens, stream=stream, **options
        )


async def chat(
    client: httpx.AsyncClient,
    messages: Sequence[Message],
    name: str | None = None,
    *,
    tokens: int = 24,
    stream: bool = False,
    url: str = URL,
    headers: dict[str, str] | None = None,
    began: asyncio.Event | None = None,
    **options: Any,
) -> Reply:
    """One greedy chat completion; ``began`` is set by the first event of a stream."""
    body = {
        "messages": list(messages),
        "max_tokens": tokens,
        "temperature": 0,
        # A test that asks for a long answer means it to last.
        "ignore_eos": tokens > 100,
        "stream": stream,
        "model": "conserve-embedded",
        **options,
    }
    sent = dict(headers or {})
    if name is not None:
        sent["X-Conversation-Id"] = name
    if not stream:
        response = await client.post(url + "/v1/chat/completions", json=body, headers=sent)
        parsed = response.json()
        content = ""
        if response.status_code == 200:
            content = parsed["choices"][0]["message"]["content"] or ""
        return Reply(response.status_code, response.headers, parsed, content)
    parts, after_s, started_s = [], [], time.perf_counter()
    async with client.stream(
        "POST", url + "/v1/chat/completions", json=body, headers=sent
    ) as response:
        events = []
        async for line in response.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                after_s.append(time.perf_counter() - started_s)
                event = json.loads(line[6:])
                events.append(event)
                if began is not None:
                    began.set()
                parts += [
                    choice["delta"].get("content") or "" for choice in event.get("choices", [])
                ]
        return Reply(response.status_code, response.headers, events, "".join(parts), after_s)


async def last_turn(client: httpx.AsyncClient, conversation_id: str) -> dict[str, int]:
    """What the engine reported of a conversation's last turn."""
    response = await client.get(f"{URL}/v1/conversations/{conversation_id}")
    assert response.status_code == 200, response.text
    stats: dict[str, int] = response.json()["last_turn"]
    return stats


def require_reuse(seen: Sequence[tuple[str, str, dict[str, int]]]) -> None:
    """Of turns' conversations, decoders and stats: what comes first is all that is handed off."""
    assert len({turn[:2] for turn in seen}) == 1
    first, *later = [stats for *_, stats in seen]
    assert first["lmcache_tokens"] == (first["prompt_tokens"] - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert first["decoder_cached_tokens"] == 0
    for before, stats in zip([first, *later], later, strict=False):
        assert stats["lmcache_tokens"] == 0
        assert stats["decoder_cached_tokens"] >= before["prompt_tokens"] - BLOCK_TOKENS


async def lone_answer(
    client: httpx.AsyncClient, messages: Sequence[Message], tokens: int, **options: Any
) -> str:
    """What the lone engine answers to the same messages."""
    url = f"http://127.0.0.1:{LONE_PORT}"
    reply = await chat(client, messages, tokens=tokens, url=url, **options)
    assert reply.status == 200, reply.body
    return reply.content


def new_client() -> httpx.AsyncClient:
    """A client with room for many requests at a time."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=50)
    return httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits)


def engines(role: str | None = None) -> list[dict[str, Any]]:
    """Engines alive, as ``GET /v1/engines`` has them."""
    data: list[dict[str, Any]] = httpx.get(URL + "/v1/engines", timeout=30).json()["data"]
    return [engine for engine in data if role is None or engine["role"] == role]


def release_all() -> None:
    """End every live conversation."""
    listed = httpx.get(URL + "/v1/conversations?limit=10000", timeout=30).json()["data"]
    for conversation in listed:
        httpx.delete(f"{URL}/v1/conversations/{quote(conversation['id'], safe='')}", timeout=30)
