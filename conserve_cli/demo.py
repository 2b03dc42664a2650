"""``conserve demo``: runs a few agents while you watch.

Each agent does a task of several tool calls with the embedded model, the official client and real
Python tools. For each turn a table shows what the agent did, and where the engines found the
prompt's KV: the first turn's in LMCache (the one handoff), later ones' in the decoder's own cache.

Agents that name their conversation are `conserve.client.Agent`s, which tell the server when a tool
starts and ends. The others are any client of OpenAI's API.
"""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import httpx
import typer
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
from conserve.client import Agent
from conserve_cli.launching import LogFile, SettingArguments, launched, settings_from
from conserve_cli.output import console

cli = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_OUTPUT_TOKENS = 256
_MOST_CALLS = 6
# A tool's duration, long enough for the agents' turns to interleave.
_TOOL_S = 0.3
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class TurnRow:
    """A turn, with tokens as the engines reported them; ``does`` is what it called."""

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
class AgentAnswer:
    """An agent's answer to its task."""

    conversation: str
    text: str
    ttfet_s: float | None  # None without an answer.
    right: bool


@dataclass(slots=True)
class Demonstration:
    """Everything that the demonstration saw."""

    turns: list[TurnRow] = field(default_factory=list)
    answers: list[AgentAnswer] = field(default_factory=list)
    handoffs: int = 0  # Turns that took KV from LMCache.
    moves: int = 0  # Turns that ran on another decoder than the one before.
    errors: int = 0
    problems: list[str] = field(default_factory=list)

    def verdict(
        self, conversations: int, turns: int, *, always_handed_off: bool = False
    ) -> list[str]:
        """Return what is not as promised, for this many conversations of at least ``turns`` turns.

        With ``always_handed_off`` every first prompt has to come from a prefiller.
        """
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
            if handed != [1] and (always_handed_off or handed):
                wrong.append(f"{name}: handed off in turns {handed}, not once, in turn 1")
            if len({row.decoder for row in rows}) != 1:
                wrong.append(f"{name}: changed its decoder")
        return wrong


def write_json(seen: Demonstration, path: Path) -> None:
    body = {
        "turns": [asdict(row) for row in seen.turns],
        "handoffs": seen.handoffs,
        "moves": seen.moves,
        "errors": seen.errors,
        "answers": [asdict(answer) for answer in seen.answers],
    }
    path.write_text(json.dumps(body, indent=2) + "\n")


@cli.command()
def demo(
    settings: SettingArguments = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Also write what was seen to this file.")
    ] = None,
    conversations: Annotated[
        int, typer.Option(min=1, help="How many conversations run at the same time.")
    ] = 4,
    turns: Annotated[int, typer.Option(min=2, help="How many turns each has at least.")] = 4,
    log: LogFile = None,
) -> None:
    """Have a few agents work, and show where every prompt's KV came from."""
    chosen = settings_from(settings)
    with launched(chosen, settings or [], log) as (_, url):
        with console.status("running turns") as status:
            seen = 0

            def on_turn(row: TurnRow) -> None:
                nonlocal seen
                seen += 1
                status.update(f"running turns: {seen} done")
                if not console.is_terminal:
                    console.print(f"  {row.conversation}: turn {row.turn} done", highlight=False)

            outcome = asyncio.run(converse(url, chosen.model_id, conversations, turns, on_turn))
        report(outcome, console)
        console.print("Stopping every process.")
    if json_path is not None:
        write_json(outcome, json_path)
    wrong = outcome.verdict(
        conversations, turns, always_handed_off=chosen.policy_class.only_first_prompts
    )
    for problem in wrong:
        console.print(f"[red]Not as promised:[/red] {problem}")
    if wrong:
        raise typer.Exit(1)
    console.print("[bold green]Each conversation: one engine, and no KV moved twice.[/bold green]")


async def converse(
    url: str,
    model: str,
    conversations: int,
    turns: int,
    on_turn: Callable[[TurnRow], None],
    seed: int = 4,
) -> Demonstration:
    """Run agents at the same time, each through the official client, for at least ``turns`` turns.

    Every second agent sends no conversation id and is recognised by its messages. ``seed`` chooses
    the
    tasks.
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
        """The agent's name in the table."""
        return f"agent-{self.number}" if self.number % 2 else f"agent-{self.number} (no id)"

    async def run(self) -> None:
        if self.number % 2:
            self.named = Agent(self.url, f"agent-{self.number}")
        try:
            await self._work()
        finally:
            if self.named is not None:
                # It blocks until the server answers.
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
        """Tell the server that the tools the model has called start, or have ended."""
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


def report(seen: Demonstration, console: Console) -> None:
    table = Table(
        title="Where each prompt's KV came from, in tokens; TTFT in ms",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    # The columns are narrow, so that what the agent does fits into 80 columns beside them.
    table.add_column("agent", no_wrap=True)
    for column in ("turn", "prompt", "own", "LMCache", "TTFT"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("on", no_wrap=True)
    table.add_column("does", overflow="fold")
    last = None
    for row in seen.turns:
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
    prompts = sum(row.prompt_tokens for row in seen.turns)
    computed = prompts - sum(row.decoder_cached_tokens + row.lmcache_tokens for row in seen.turns)
    first = [row.ttft_s for row in seen.turns if row.turn == 1]
    later = [row.ttft_s for row in seen.turns if row.turn > 1]
    conversations = len({row.conversation for row in seen.turns})
    console.print(
        f"{conversations} conversations, {len(seen.turns)} turns, "
        f"{_counted(seen.handoffs, 'handoff')}, {_counted(seen.moves, 'move')}, "
        f"{_counted(seen.errors, 'error')}. "
        f"Decoders computed {computed:,} of {prompts:,} prompt tokens."
    )
    if first and later:
        console.print(f"Mean TTFT: turn 1 {_mean_ms(first)} ms, later turns {_mean_ms(later)} ms.")
    answers = Table("agent", "TTFET", "answer", box=box.SIMPLE_HEAD)
    for answer in seen.answers:
        ttfet = "-" if answer.ttfet_s is None else f"{answer.ttfet_s:.2f} s"
        text = escape(answer.text) if answer.right else f"[red]{escape(answer.text)}[/red] (wrong)"
        answers.add_row(_short(answer.conversation), ttfet, text)
    console.print(answers)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _short(name: str) -> str:
    return name.replace(" (no id)", "*")


def _mean_ms(values_s: list[float]) -> str:
    return f"{sum(values_s) / len(values_s) * 1000:,.0f}"
