"""``conserve demo``: agents at work, served while you watch.

Each agent gets a task that takes several tool calls, and does it with the embedded model, the
official client and real Python tools. Turn by turn it shows what the agent did, and where the
prompt's KV came from, by the engines' own account: the first turn's from LMCache (the one
handoff), later ones' from the decoder's own cache.
"""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx
from openai import APIError, AsyncOpenAI
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

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

_OUTPUT_TOKENS = 256
_MOST_CALLS = 6
# A tool takes a while; so the agents' turns interleave.
_TOOL_S = 0.3
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class TurnRow:
    """One turn; counts in tokens, as the engines reported them; ``does`` is what it called."""

    conversation: str
    turn: int
    prompt_tokens: int
    decoder_cached_tokens: int
    lmcache_tokens: int
    ttft_s: float
    output_tokens: int
    decoder: str
    does: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """How an agent's task ended.

    Attributes:
        ttfet_s: from its first request to the first token of its answer; None without one.
        right: whether it states what it should.
    """

    conversation: str
    text: str
    ttfet_s: float | None
    right: bool


@dataclass(slots=True)
class Outcome:
    """What the demonstration saw.

    Attributes:
        handoffs: turns that took KV from LMCache.
        moves: turns that ran on another decoder than the one before.
        errors: turns that failed, with what was said, in ``problems``.
    """

    turns: list[TurnRow] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    handoffs: int = 0
    moves: int = 0
    errors: int = 0
    problems: list[str] = field(default_factory=list)

    def verdict(self, conversations: int, turns: int) -> list[str]:
        """What is not as promised; empty if all is."""
        wrong = list(self.problems)
        by_conversation: dict[str, list[TurnRow]] = {}
        for row in self.turns:
            by_conversation.setdefault(row.conversation, []).append(row)
        if len(by_conversation) != conversations:
            wrong.append(f"{len(by_conversation)} conversations were seen, not {conversations}")
        for name, rows in by_conversation.items():
            if len(rows) < turns:
                wrong.append(f"{name}: {len(rows)} turns succeeded, not {turns} or more")
            handed = [row.turn for row in rows if row.lmcache_tokens]
            if handed != [1]:
                wrong.append(f"{name}: handed off in turns {handed}, not once, in turn 1")
            if len({row.decoder for row in rows}) != 1:
                wrong.append(f"{name}: changed its decoder")
        return wrong


async def converse(
    url: str,
    model: str,
    conversations: int,
    turns: int,
    on_turn: Callable[[TurnRow], None],
    seed: int = 4,
) -> Outcome:
    """Run agents at the same time, each through the official client.

    Every second one sends no conversation id: it is recognised by what it says.

    Args:
        turns: at least so many each.
        on_turn: is told of each turn when it is over.
        seed: which tasks.
    """
    outcome = Outcome()
    async with (
        AsyncOpenAI(base_url=url + "/v1", api_key="unused", timeout=_TIMEOUT_S) as client,
        httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S) as plain,
    ):
        agents = [
            _Agent(number, model, turns, seed, client, plain, outcome, on_turn)
            for number in range(1, conversations + 1)
        ]
        await asyncio.gather(*(agent.run() for agent in agents))
    outcome.turns.sort(key=lambda row: (row.conversation, row.turn))
    outcome.answers.sort(key=lambda answer: answer.conversation)
    return outcome


@dataclass(slots=True)
class _Agent:
    number: int
    model: str
    turns: int
    seed: int
    client: AsyncOpenAI
    plain: httpx.AsyncClient
    outcome: Outcome
    on_turn: Callable[[TurnRow], None]
    done: int = 0
    decoder: str | None = None
    began_s: float = 0.0
    ttfet_s: float | None = None

    @property
    def name(self) -> str:
        """As the table shows it."""
        return f"agent-{self.number}" if self.number % 2 else f"agent-{self.number} (no id)"

    async def run(self) -> None:
        session = self._session()
        headers = {"X-Conversation-Id": f"agent-{self.number}"} if self.number % 2 else {}
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
                self.outcome.errors += 1
                self.outcome.problems.append(f"{self.name}, turn {self.done + 1}: {error}")
                return
            messages = transcript.messages
            if number == 0:
                text = transcript.answer or ""
                answer = Answer(self.name, text, self.ttfet_s, is_right(task, text))
                self.outcome.answers.append(answer)
            # A model that took a short way gets another task.
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
            sent_s = time.perf_counter()
            reply = await ask(messages, schemas)
            await self._write_down(reply, sent_s)
            return reply

        return complete

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
        self.outcome.turns.append(row)
        self.outcome.handoffs += row.lmcache_tokens > 0
        self.outcome.moves += self.decoder not in (None, row.decoder)
        self.decoder = row.decoder
        self.on_turn(row)


def _short(name: str) -> str:
    return name.replace(" (no id)", "*")


def _called(function: Message) -> str:
    try:
        arguments = json.loads(function["arguments"])
        given = ", ".join(str(value) for value in arguments.values())
    except (ValueError, AttributeError):
        given = function["arguments"]
    return f"{function['name']}({given})"


def report(outcome: Outcome, console: Console) -> None:
    """A row a turn, and a closing summary."""
    table = Table(
        title="Where each prompt's KV came from, in tokens; TTFT in ms",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    # Narrow enough for 80 columns with what the agent does in them.
    table.add_column("agent", no_wrap=True)
    for column in ("turn", "prompt", "own", "LMCache", "TTFT"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("on", no_wrap=True)
    table.add_column("does", overflow="fold")
    last = None
    for row in outcome.turns:
        if last not in (None, row.conversation):
            table.add_section()
        table.add_row(
            _short(row.conversation) if row.conversation != last else "",
            str(row.turn),
            f"{row.prompt_tokens:,}",
            f"{row.decoder_cached_tokens:,}" if row.decoder_cached_tokens else "-",
            f"[bold]{row.lmcache_tokens:,}[/bold]" if row.lmcache_tokens else "-",
            f"{row.ttft_s * 1000:,.0f}",
            row.decoder[:4],
            escape(row.does),
        )
        last = row.conversation
    console.print(table)
    console.print(
        "own: found in the cache of the decoder that the turn ran on; LMCache: handed off; "
        "*: sends no conversation id."
    )
    prompts = sum(row.prompt_tokens for row in outcome.turns)
    computed = prompts - sum(
        row.decoder_cached_tokens + row.lmcache_tokens for row in outcome.turns
    )
    first = [row.ttft_s for row in outcome.turns if row.turn == 1]
    later = [row.ttft_s for row in outcome.turns if row.turn > 1]
    conversations = len({row.conversation for row in outcome.turns})
    console.print(
        f"{conversations} conversations, {len(outcome.turns)} turns, "
        f"{outcome.handoffs} handoffs, {outcome.moves} moves, {outcome.errors} errors. "
        f"Decoders computed {computed:,} of {prompts:,} prompt tokens."
    )
    if first and later:
        console.print(f"Mean TTFT: turn 1 {_mean_ms(first)} ms, later turns {_mean_ms(later)} ms.")
    answers = Table("agent", "TTFET", "answer", box=box.SIMPLE_HEAD)
    for answer in outcome.answers:
        ttfet = "-" if answer.ttfet_s is None else f"{answer.ttfet_s:.2f} s"
        text = escape(answer.text) if answer.right else f"[red]{escape(answer.text)}[/red] (wrong)"
        answers.add_row(_short(answer.conversation), ttfet, text)
    console.print(answers)


def write_json(outcome: Outcome, path: Path) -> None:
    """The outcome for programs."""
    body = {
        "turns": [asdict(row) for row in outcome.turns],
        "handoffs": outcome.handoffs,
        "moves": outcome.moves,
        "errors": outcome.errors,
        "answers": [asdict(answer) for answer in outcome.answers],
    }
    path.write_text(json.dumps(body, indent=2) + "\n")


def _mean_ms(values_s: list[float]) -> str:
    return f"{sum(values_s) / len(values_s) * 1000:,.0f}"
