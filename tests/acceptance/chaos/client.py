"""Clients that play their conversations on the real thing, misbehave, and come back."""

import asyncio
import contextlib
import json
import time
from dataclasses import dataclass
from typing import Any

import httpx

from tests.acceptance.chaos.plan import Plan, PlannedConversation, PlannedTurn
from tests.acceptance.chaos.tally import Answered, Tally

# The longest that a turn may take, all its repetitions included.
TURN_S = 600.0
# OpenAI's clients wait between these.
_BACKOFF_S, _LONGEST_BACKOFF_S = 0.5, 8.0
_RETRIED = (408, 409, 429, 503)
_PATH = "/v1/chat/completions"
_MODEL = "conserve-embedded"

Message = dict[str, str]


class Again(Exception):
    """There is no answer, for a reason that goes away."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer, whole."""

    content: str
    conversation: str
    tokens: int


def body_of(messages: list[Message], output_tokens: int) -> dict[str, Any]:
    """A greedy chat, as it is also sent to the engine that answers are compared with."""
    return {
        "model": _MODEL,
        "messages": messages,
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": output_tokens > 100,
    }


@dataclass
class Clients:
    """All clients of a run.

    Args:
        url: the application's.
        until_s: no conversation begins later; by `time.monotonic`.
    """

    plan: Plan
    url: str
    tally: Tally
    http: httpx.AsyncClient
    until_s: float

    async def play(self) -> None:
        """Play all conversations to their ends."""
        async with asyncio.TaskGroup() as group:
            for number in range(self.plan.clients):
                group.create_task(self._client(number))

    async def _client(self, number: int) -> None:
        # Not all at once, as nobody's clients are.
        await asyncio.sleep(number * 0.1)
        for conversation in self.plan.conversations(number):
            self.tally.live += 1
            try:
                async with asyncio.TaskGroup() as group:
                    await self._converse(conversation, group)
            except* AssertionError as errors:
                self.tally.fail(f"{conversation.key}: {errors.exceptions[0]}")
            finally:
                self.tally.live -= 1
                self.tally.ended += 1
            if time.monotonic() >= self.until_s:
                break

    async def _converse(self, conversation: PlannedConversation, beside: asyncio.TaskGroup) -> None:
        messages: list[Message] = []
        name = conversation.name
        for number, turn in enumerate(conversation.turns):
            await asyncio.sleep(turn.think_s)
            messages.append({"role": "user", "content": conversation.prose(number)})
            try:
                async with asyncio.timeout(TURN_S):
                    reply = await self._answered(conversation, turn, messages, beside)
            except TimeoutError:
                raise AssertionError(f"turn {number} was not answered in {TURN_S:g} s") from None
            if reply is None:
                self.tally.held.pop(conversation.key, None)
                return
            self.tally.turns += 1
            self.tally.streams += turn.streamed
            self.tally.answers.append(
                Answered(conversation.key, tuple(messages), turn.output_tokens, reply.content)
            )
            messages.append({"role": "assistant", "content": reply.content})
            name = reply.conversation
            if conversation.name is not None:
                assert name == conversation.name, f"it was given the id {name}"
                # What a turn sent twice leaves depends on which of them ended last.
                if turn.misdeed != "reconnect":
                    self.tally.held[name] = reply.tokens
                else:
                    self.tally.held.pop(name, None)
        if conversation.released and name is not None:
            await self._release(name)

    async def _release(self, name: str) -> None:
        self.tally.held.pop(name, None)
        async with asyncio.timeout(TURN_S):
            while True:
                try:
                    response = await self.http.delete(f"{self.url}/v1/conversations/{name}")
                except httpx.TransportError as error:
                    self.tally.broken(name, f"{error!r} from {error.__cause__!r}", streaming=False)
                else:
                    # A table that was lost knows nothing of conversations that were bound nowhere.
                    if response.status_code in (200, 404):
                        return
                    assert response.status_code == 503, response.text
                await asyncio.sleep(_BACKOFF_S)

    async def _answered(
        self,
        conversation: PlannedConversation,
        turn: PlannedTurn,
        messages: list[Message],
        beside: asyncio.TaskGroup,
    ) -> Reply | None:
        """The answer, however often it has to be asked for; None if the client leaves for good."""
        body = body_of(messages, turn.output_tokens)
        if turn.streamed:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        misdeed = turn.misdeed
        backoff_s = _BACKOFF_S
        while True:
            if misdeed is not None:
                self.tally.misdeeds[misdeed] += 1
            if misdeed == "half-send":
                beside.create_task(self._send_half(body, turn.for_s))
            stall = turn if misdeed == "stall" else None
            asking = asyncio.ensure_future(self._ask(conversation, body, stall))
            if misdeed in ("cancel", "reconnect", "vanish"):
                await asyncio.wait([asking], timeout=turn.misdeed_s)
                letting_go = self._let_go(asking, turn.for_s if misdeed == "reconnect" else 0.0)
                if misdeed == "reconnect":
                    beside.create_task(letting_go)
                else:
                    await letting_go
                if misdeed == "vanish":
                    return None
                misdeed = None
                continue
            misdeed = None
            try:
                return await asking
            except Again:
                await asyncio.sleep(backoff_s)
                backoff_s = min(backoff_s * 2, _LONGEST_BACKOFF_S)
            finally:
                asking.cancel()

    async def _let_go(self, asking: "asyncio.Task[Reply]", after_s: float) -> None:
        await asyncio.wait([asking], timeout=after_s)
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError, Again):
            await asking

    async def _ask(
        self, conversation: PlannedConversation, body: dict[str, Any], stall: PlannedTurn | None
    ) -> Reply:
        """Send a turn once.

        Raises:
            Again: it is to be sent again.
        """
        headers = {} if conversation.name is None else {"X-Conversation-Id": conversation.name}
        began_s = time.monotonic()
        streaming = False
        try:
            async with self.http.stream(
                "POST", self.url + _PATH, json=body, headers=headers
            ) as response:
                if response.status_code != 200:
                    self._refused(conversation.key, response.status_code, await response.aread())
                name = response.headers["x-conversation-id"]
                if not body.get("stream"):
                    if stall is not None:
                        await asyncio.sleep(stall.for_s)
                    return _whole(name, await response.aread())
                streaming = True
                texts, tokens, done = [], 0, False
                async for line in response.aiter_lines():
                    if stall is not None and time.monotonic() - began_s >= stall.misdeed_s:
                        await asyncio.sleep(stall.for_s)
                        stall = None
                    if not line.startswith("data: "):
                        continue
                    if line == "data: [DONE]":
                        done = True
                        continue
                    event = json.loads(line[6:])
                    if "error" in event:
                        code = event["error"].get("code") or event["error"].get("type")
                        self.tally.stream_failed(conversation.key, str(code), began_s)
                        raise Again
                    texts += [one["delta"].get("content") or "" for one in event["choices"]]
                    if event.get("usage"):
                        tokens = event["usage"]["total_tokens"]
                assert done, "a stream ended without a word"
                return Reply("".join(texts), name, tokens)
        except httpx.TransportError as error:
            self.tally.broken(conversation.key, f"{error!r} from {error.__cause__!r}", streaming)
            raise Again from error

    def _refused(self, key: str, status: int, raw: bytes) -> None:
        error = json.loads(raw)["error"]
        # Both decoders were killed with this prompt: for all that ConServe knows, it was the cause.
        poison = (status, error["code"]) == (500, "engines_lost")
        assert status in _RETRIED or poison, f"{status}: {error}"
        self.tally.retries[f"{status} {error['code']}"] += 1
        raise Again

    async def _send_half(self, body: dict[str, Any], for_s: float) -> None:
        """Announce a body, send half of it, and no more, until the connection is given up."""
        url = httpx.URL(self.url)
        raw = json.dumps(body).encode()
        head = (
            f"POST {_PATH} HTTP/1.1\r\nHost: {url.host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(raw)}\r\n\r\n"
        )
        # The router may be away.
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(url.host, url.port)
            writer.write(head.encode() + raw[: len(raw) // 2])
            await writer.drain()
            await asyncio.sleep(for_s)
            writer.close()
            await writer.wait_closed()


def _whole(name: str, raw: bytes) -> Reply:
    parsed = json.loads(raw)
    content = parsed["choices"][0]["message"]["content"] or ""
    return Reply(content, name, parsed["usage"]["total_tokens"])
