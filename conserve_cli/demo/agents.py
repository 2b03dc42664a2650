"""The agents of a demonstration: each does its task, and notes what its turns were.

Those that name their conversation are `conserve.client.Agent`s: they tell the server when a tool
starts and ends, and end their conversation. The others are any client of OpenAI's API.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import httpx
from openai import APIError, AsyncOpenAI

from benchmarks.agent import (
    Complete,
    Message,
    Reply,
    Schema,
    Session,
    client_complete,
    is_right,
    make_session,
    run_agent,
)
from conserve.client import Agent
from conserve_cli.demo.demonstration import AgentAnswer, Demonstration, TurnRow

_OUTPUT_TOKENS = 256
_MOST_CALLS = 6
# How long a tool takes: long enough for the agents' turns to interleave.
_TOOL_S = 0.3
_TIMEOUT_S = 120.0


async def converse(
    url: str,
    model: str,
    conversations: int,
    turns: int,
    on_turn: Callable[[TurnRow], None],
    seed: int = 4,
) -> Demonstration:
    """Run agents at the same time, each through the official client.

    Every second agent sends no conversation id: it is recognised by what it says.

    Args:
        turns: how many turns each has at least.
        on_turn: called with each turn when it is over.
        seed: chooses the tasks.
    """
    seen = Demonstration()
    async with (
        AsyncOpenAI(base_url=url + "/v1", api_key="unused", timeout=_TIMEOUT_S) as client,
        httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S) as plain,
    ):
        agents = [
            _Agent(number, url, model, turns, seed, client, plain, seen, on_turn)
            for number in range(1, conversations + 1)
        ]
        await asyncio.gather(*(agent.run() for agent in agents))
    seen.turns.sort(key=lambda row: (row.conversation, row.turn))
    seen.answers.sort(key=lambda answer: answer.conversation)
    return seen


@dataclass(slots=True)
class _Agent:
    number: int
    url: str
    model: str
    turns: int
    seed: int
    client: AsyncOpenAI
    plain: httpx.AsyncClient
    seen: Demonstration
    on_turn: Callable[[TurnRow], None]
    done: int = 0
    decoder: str | None = None
    began_s: float = 0.0
    ttfet_s: float | None = None
    named: Agent | None = None
    running: list[Message] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The agent's name, as the table shows it."""
        return f"agent-{self.number}" if self.number % 2 else f"agent-{self.number} (no id)"

    async def run(self) -> None:
        """Do the tasks; what fails is noted."""
        async with self._ended():
            await self._work()

    @contextlib.asynccontextmanager
    async def _ended(self) -> AsyncIterator[None]:
        """Be a `conserve.client.Agent` for the time of the block, if the agent has a name.

        That one waits for the server's answers; so it does in threads, and others go on.
        """
        if self.number % 2:
            self.named = Agent(self.url, f"agent-{self.number}")
        try:
            yield
        finally:
            if self.named is not None:
                await asyncio.to_thread(self.named.close)

    async def _work(self) -> None:
        session = self._session()
        headers = {} if self.named is None else {"X-Conversation-Id": self.named.conversation}
        ask = client_complete(
            self.client, self.model, max_tokens=_OUTPUT_TOKENS, extra_headers=headers
        )
        messages: list[Message] = [{"role": "system", "content": session.system}]
        self.began_s = time.perf_counter()
        for number, task in enumerate(session.tasks):
            messages.append({"role": "user", "content": task.question})
            try:
                transcript = await run_agent(
                    self._observed(ask), messages, session.schemas, session.toolbox.run
                )
            except (APIError, httpx.HTTPError, KeyError) as error:
                self.seen.errors += 1
                self.seen.problems.append(f"{self.name}, turn {self.done + 1}: {error}")
                return
            messages = transcript.messages
            if number == 0:
                text = transcript.answer or ""
                answer = AgentAnswer(self.name, text, self.ttfet_s, is_right(task, text))
                self.seen.answers.append(answer)
            # A model that needed fewer turns than asked for gets another task.
            if self.done >= self.turns:
                return

    def _session(self) -> Session:
        fewest = min(self.turns - 1, _MOST_CALLS)
        seed = f"demo/{self.seed}/{self.number}"
        return make_session(seed, "held-out", tasks=self.turns, steps=(fewest, _MOST_CALLS))

    def _observed(self, ask: Complete) -> Complete:
        async def complete(messages: Sequence[Message], schemas: Sequence[Schema]) -> Reply:
            if self.done:
                await asyncio.sleep(_TOOL_S)
            await self._report("end", wall_s=_TOOL_S)
            self.running = []
            sent_s = time.perf_counter()
            reply = await ask(messages, schemas)
            await self._write_down(reply, sent_s)
            self.running = reply.message.get("tool_calls") or []
            await self._report("start")
            return reply

        return complete

    async def _report(self, event: str, **details: float) -> None:
        """Tell the server that the tools that the model has called start, or have ended."""
        if self.named is not None:
            for call in self.running:
                told = {"tool": call["function"]["name"], "call_id": call["id"], **details}
                await asyncio.to_thread(self.named.report, event, **told)

    async def _write_down(self, reply: Reply, sent_s: float) -> None:
        headers, ttft_s = reply.info["headers"], reply.info["ttft_s"]
        found = await self.plain.get(f"/v1/conversations/{headers['x-conversation-id']}")
        found.raise_for_status()
        said = found.json()["last_turn"]
        calls = reply.message.get("tool_calls") or []
        if not calls and self.ttfet_s is None:
            self.ttfet_s = round(sent_s + ttft_s - self.began_s, 4)
        self.done += 1
        row = TurnRow(
            conversation=self.name,
            turn=self.done,
            prompt_tokens=said["prompt_tokens"],
            decoder_cached_tokens=said["decoder_cached_tokens"],
            lmcache_tokens=said["lmcache_tokens"],
            ttft_s=round(ttft_s, 4),
            output_tokens=said["output_tokens"],
            decoder=headers["x-conserve-decoder"],
            does=", ".join(_called(call["function"]) for call in calls) or "answers",
        )
        self.seen.turns.append(row)
        self.seen.handoffs += row.lmcache_tokens > 0
        self.seen.moves += self.decoder not in (None, row.decoder)
        self.decoder = row.decoder
        self.on_turn(row)


def _called(function: Message) -> str:
    try:
        arguments = json.loads(function["arguments"])
        given = ", ".join(str(value) for value in arguments.values())
    except (ValueError, AttributeError):
        given = function["arguments"]
    return f"{function['name']}({given})"
