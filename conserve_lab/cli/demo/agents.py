"""The demonstration's agents: how they work, and how each of their turns is noted."""

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import sub
from typing import Any

import httpx
from openai import APIConnectionError, APIError, AsyncOpenAI

from conserve_lab.agent import (
    Complete,
    Message,
    Reply,
    Schema,
    client_complete,
    is_right,
    make_session,
    run_agent,
)
from conserve_lab.agent.screens import CLICK, Walk
from conserve_lab.cli.demo.kill import RouterKill, counters
from conserve_lab.cli.demo.seen import REPORTED, AgentAnswer, Demonstration, TurnRow
from conserve_tools.client import Agent

_OUTPUT_TOKENS = 256
_MOST_CALLS = 6
# A tool's duration, long enough for the agents' turns to interleave.
_TOOL_S = 0.3
_TIMEOUT_S = 600.0
# Once the router is killed, what breaks is sent again this often, with these pauses.
_MOST_AGAIN, _AGAIN_S = 20, 0.5


async def converse(
    url: str,
    model: str,
    conversations: int,
    turns: int,
    on_turn: Callable[[TurnRow], None],
    seed: int = 4,
    *,
    seeing: bool = False,
    kill: RouterKill | None = None,
) -> Demonstration:
    """Run agents at the same time, each through the official client, for at least ``turns`` turns.

    Every second agent sends no conversation id and is recognised by its messages. ``seed`` chooses
    the tasks. Of agents that see, the second half begins when the first is done. It is shown the
    same screens, with other words around them, so that only images can be found. After the
    ``kill``, agents send turns again whose streams break.
    """
    seen = Demonstration()
    async with (
        AsyncOpenAI(base_url=url + "/v1", api_key="unused", timeout=_TIMEOUT_S) as client,
        httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S) as plain,
    ):
        first = (conversations + 1) // 2 if seeing else conversations
        kind = _Seeing if seeing else _Calculating
        agents = [
            kind(number, url, model, turns, seed, client, plain, seen, on_turn, first, kill)
            for number in range(1, conversations + 1)
        ]
        before = await counters(plain) if kill else []
        for each in (agents[:first], agents[first:]):
            await asyncio.gather(*(agent.run() for agent in each))
        if kill:
            seen.generated_tokens, seen.rejoined = map(sub, await counters(plain), before)
    seen.turns.sort(key=lambda row: (row.conversation, row.turn))
    seen.answers.sort(key=lambda answer: answer.conversation)
    return seen


@dataclass(slots=True)
class _Agent(ABC):
    """An agent of either kind, which notes its turns."""

    number: int
    url: str
    model: str
    turns: int
    seed: int
    client: AsyncOpenAI
    plain: httpx.AsyncClient
    seen: Demonstration
    on_turn: Callable[[TurnRow], None]
    first: int  # Those of higher numbers are shown what the first agents have seen.
    kill: RouterKill | None
    done: int = 0
    again: int = 0  # How often the last request was sent again.
    sent_s: float = 0.0
    decoder: str | None = None
    began_s: float = 0.0
    ttfet_s: float | None = None
    named: Agent | None = None
    running: list[Message] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The agent's name in the table."""
        return f"agent-{self.number}" if self.number % 2 else f"agent-{self.number} (no id)"

    async def run(self) -> None:
        if self.number % 2:
            self.named = Agent(self.url, f"agent-{self.number}")
        headers = {} if self.named is None else {"X-Conversation-Id": self.named.conversation}
        begins = self.kill.begins if self.kill else None
        ask = client_complete(
            self.client, self.model, begins, max_tokens=_OUTPUT_TOKENS, extra_headers=headers
        )
        self.began_s = time.perf_counter()
        try:
            await self._work(self._observed(ask))
        except (APIError, httpx.HTTPError, KeyError) as error:
            self.seen.errors += 1
            self.seen.problems.append(f"{self.name}, turn {self.done + 1}: {error}")
        finally:
            if self.named is not None:
                # It blocks until the server answers.
                await asyncio.to_thread(self.named.close)

    @abstractmethod
    async def _work(self, ask: Complete) -> None:
        """Do the agent's task; each call of the model is one turn."""

    def _answers(self, text: str, right: bool) -> None:
        self.seen.answers.append(AgentAnswer(self.name, text, self.ttfet_s, right))

    def _observed(self, ask: Complete) -> Complete:
        async def complete(messages: Sequence[Message], schemas: Sequence[Schema]) -> Reply:
            if self.done:
                await asyncio.sleep(_TOOL_S)
            await self._report("end", wall_s=_TOOL_S)
            self.running = []
            reply: Reply = await self._answered(partial(ask, messages, schemas))
            await self._write_down(reply, self.sent_s, _images(messages))
            self.running = reply.message.get("tool_calls") or []
            await self._report("start")
            return reply

        return complete

    async def _answered(self, ask: Callable[[], Awaitable[Any]]) -> Any:
        self.again = 0
        while True:
            self.sent_s = time.perf_counter()
            try:
                return await ask()
            except (httpx.TransportError, APIConnectionError):
                if not (self.kill and self.kill.done) or self.again == _MOST_AGAIN:
                    raise
            self.again += 1
            await asyncio.sleep(_AGAIN_S)

    async def _report(self, event: str, **details: float) -> None:
        """Tell the server that the tools the model has called start, or have ended."""
        if self.named is not None:
            for call in self.running:
                told = {"tool": call["function"]["name"], "call_id": call["id"], **details}
                await asyncio.to_thread(self.named.report, event, **told)

    async def _write_down(self, reply: Reply, sent_s: float, images: int) -> None:
        headers, ttft_s = reply.info["headers"], reply.info["ttft_s"]
        if "finish_reason" not in reply.info:
            raise KeyError("the answer has no end")
        again = self.again + reply.info["retries"]
        path = f"/v1/conversations/{headers['x-conversation-id']}"
        found = await self._answered(partial(self.plain.get, path))
        found.raise_for_status()
        said = found.json()["last_turn"]
        calls = reply.message.get("tool_calls") or []
        if not calls and self.ttfet_s is None:
            self.ttfet_s = round(sent_s + ttft_s - self.began_s, 4)
        self.done += 1
        row = TurnRow(
            conversation=self.name,
            turn=self.done,
            ttft_s=round(ttft_s, 4),
            decoder=headers["x-conserve-decoder"],
            does=", ".join(_called(call["function"]) for call in calls) or "answers",
            images=images,
            again=again,
            **{name: said[name] for name in REPORTED},
        )
        self.seen.turns.append(row)
        self.seen.handoffs += row.lmcache_tokens > 0
        self.seen.moves += self.decoder not in (None, row.decoder)
        self.decoder = row.decoder
        self.on_turn(row)


class _Calculating(_Agent):
    """An agent with Python tools."""

    async def _work(self, ask: Complete) -> None:
        fewest, seed = min(self.turns - 1, _MOST_CALLS), f"demo/{self.seed}/{self.number}"
        session = make_session(seed, "held-out", tasks=self.turns, steps=(fewest, _MOST_CALLS))
        messages: list[Message] = [{"role": "system", "content": session.system}]
        for number, task in enumerate(session.tasks):
            messages.append({"role": "user", "content": task.question})
            transcript = await run_agent(ask, messages, session.schemas, session.toolbox.run)
            messages = transcript.messages
            if number == 0:
                text = transcript.answer or ""
                self._answers(text, is_right(task, text))
            # A model that needed fewer turns than asked for gets another task.
            if self.done >= self.turns:
                return


class _Seeing(_Agent):
    """An agent that clicks through screens."""

    async def _work(self, ask: Complete) -> None:
        again = self.number > self.first
        screens = f"demo/{self.seed}/{self.number - self.first * again}"
        walk = Walk.draw(screens, "held-out", self.turns - 1, wording=again)
        self.seen.images += 0 if again else len(walk.screens)
        self.seen.clicks += len(walk.screens) - 1
        done = await run_agent(ask, walk.messages(), [CLICK], walk.run, max_turns=self.turns)
        self.seen.hits += sum(walk.hits)
        self._answers(done.answer or "", done.answer == walk.answer)


def _images(messages: Sequence[Message]) -> int:
    contents = [one["content"] for one in messages if isinstance(one.get("content"), list)]
    return sum(part["type"] == "image_url" for parts in contents for part in parts)


def _called(function: Message) -> str:
    try:
        arguments = json.loads(function["arguments"])
        given = ", ".join(str(value) for value in arguments.values())
    except (ValueError, AttributeError):
        given = function["arguments"]
    return f"{function['name']}({given})"
