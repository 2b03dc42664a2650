"""``conserve demo``: agents' conversations, served while you watch.

Turn by turn it shows where each prompt's KV came from, by the engines' own account: the first
turn's from LMCache (the one handoff), later ones' from the decoder's own cache.
"""

import asyncio
import inspect
import json
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
from openai import APIError, AsyncOpenAI
from rich import box
from rich.console import Console
from rich.table import Table

_OUTPUT_TOKENS = 48
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class TurnRow:
    """One turn; counts in tokens, as the engines reported them."""

    conversation: str
    turn: int
    prompt_tokens: int
    decoder_cached_tokens: int
    lmcache_tokens: int
    ttft_s: float
    output_tokens: int
    decoder: str


@dataclass(slots=True)
class Outcome:
    """What the demonstration saw.

    Attributes:
        handoffs: turns that took KV from LMCache.
        moves: turns that ran on another decoder than the one before.
        errors: turns that failed, with what was said, in ``problems``.
    """

    turns: list[TurnRow] = field(default_factory=list)
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
            if len(rows) != turns:
                wrong.append(f"{name}: {len(rows)} turns succeeded, not {turns}")
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
    seed: int = 1,
) -> Outcome:
    """Run conversations at the same time, each through the official client.

    Every second one sends no conversation id: it is recognised by what it says.
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

    async def run(self) -> None:
        rng = random.Random(f"{self.seed}/{self.number}")
        name = f"agent-{self.number}"
        headers = {"X-Conversation-Id": name} if self.number % 2 else {}
        messages: list[dict[str, str]] = [
            {"role": "system", "content": f"You are {name}, a careful software engineer."},
            {"role": "user", "content": _task(rng)},
        ]
        decoder = None
        for turn in range(1, self.turns + 1):
            try:
                row, answer = await self._turn(name, turn, messages, headers)
            except (APIError, httpx.HTTPError, KeyError) as error:
                self.outcome.errors += 1
                self.outcome.problems.append(f"{name}, turn {turn}: {error}")
                return
            self.outcome.turns.append(row)
            self.outcome.handoffs += row.lmcache_tokens > 0
            self.outcome.moves += decoder not in (None, row.decoder)
            decoder = row.decoder
            self.on_turn(row)
            messages.append({"role": "assistant", "content": answer})
            messages.append({"role": "user", "content": _observation(rng)})
            await asyncio.sleep(rng.uniform(0.1, 0.4))

    async def _turn(
        self, name: str, turn: int, messages: list[dict[str, str]], headers: dict[str, str]
    ) -> tuple[TurnRow, str]:
        started_s = time.perf_counter()
        first_s: float | None = None
        parts = []
        request: Any = self.client.chat.completions.with_raw_response
        raw = await request.create(
            model=self.model,
            messages=messages,
            max_tokens=_OUTPUT_TOKENS,
            temperature=0,
            stream=True,
            extra_headers=headers,
        )
        async for chunk in raw.parse():
            if first_s is None:
                first_s = time.perf_counter()
            parts += [choice.delta.content or "" for choice in chunk.choices]
        found = await self.plain.get(f"/v1/conversations/{raw.headers['x-conversation-id']}")
        found.raise_for_status()
        said = found.json()["last_turn"]
        row = TurnRow(
            conversation=name if headers else f"{name} (no id)",
            turn=turn,
            prompt_tokens=said["prompt_tokens"],
            decoder_cached_tokens=said["decoder_cached_tokens"],
            lmcache_tokens=said["lmcache_tokens"],
            ttft_s=round((first_s or time.perf_counter()) - started_s, 4),
            output_tokens=said["output_tokens"],
            decoder=raw.headers["x-conserve-decoder"],
        )
        return row, "".join(parts)


def report(outcome: Outcome, console: Console) -> None:
    """A row a turn, and a closing summary."""
    table = Table(
        title="Where each prompt's KV came from, in tokens",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("conversation", no_wrap=True)
    for column in ("turn", "prompt", "own cache", "LMCache", "TTFT", "output"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("decoder", no_wrap=True)
    last = None
    for row in outcome.turns:
        if last not in (None, row.conversation):
            table.add_section()
        table.add_row(
            row.conversation if row.conversation != last else "",
            str(row.turn),
            f"{row.prompt_tokens:,}",
            f"{row.decoder_cached_tokens:,}" if row.decoder_cached_tokens else "-",
            f"[bold]{row.lmcache_tokens:,}[/bold]" if row.lmcache_tokens else "-",
            f"{row.ttft_s * 1000:,.0f} ms",
            str(row.output_tokens),
            row.decoder,
        )
        last = row.conversation
    console.print(table)
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


def write_json(outcome: Outcome, path: Path) -> None:
    """The outcome for programs."""
    body = {
        "turns": [asdict(row) for row in outcome.turns],
        "handoffs": outcome.handoffs,
        "moves": outcome.moves,
        "errors": outcome.errors,
    }
    path.write_text(json.dumps(body, indent=2) + "\n")


def _mean_ms(values_s: list[float]) -> str:
    return f"{sum(values_s) / len(values_s) * 1000:,.0f}"


def _task(rng: random.Random) -> str:
    """A first prompt as agents have it: a task, and a few thousand tokens of source code."""
    import argparse
    import json.decoder
    import textwrap as wrapping

    modules: list[Any] = [json.decoder, wrapping, inspect.getmodule(argparse.ArgumentParser)]
    source = inspect.getsource(rng.choice(modules)).splitlines()
    length = min(len(source), rng.randint(120, 260))
    start = rng.randrange(len(source) - length + 1)
    issue = rng.randrange(1000, 10000)
    return f"Fix issue {issue}. The file in question:\n" + "\n".join(source[start : start + length])


def _observation(rng: random.Random) -> str:
    """What a tool gave back: short, as later turns' input is."""
    failed = rng.randrange(3)
    lines = [f"tests/test_{rng.randrange(100)}.py:{rng.randrange(400)}: ok" for _ in range(4)]
    return "\n".join([*lines, f"{failed} failed, {rng.randrange(20, 90)} passed. What next?"])
