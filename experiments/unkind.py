"""Measures what clients that do their worst, within their limits, cost the others.

    python -m experiments.unkind [--rounds 10] [--json PATH]

Agents stream answers, turn after turn, from one ConServe. Meanwhile unkind clients, in a process of
their own, send one kind of body over and over, on several connections: the largest, the deepest,
the one with the most messages, and so on. None of them is work for an engine's model: each is
refused, by the router or by the engine. Rounds go through all kinds and "none" in random order; for
each kind the table has the median over rounds of its round's p95 less the p95 of "none" in the same
round, with a bootstrap interval of 95 %.

The unkind clients' process yields to all others (nice 19): on a real network it would have cores of
its own.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import queue
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from conserve import budget
from conserve.console import new_console
from conserve.launch import Launch
from conserve.settings import Settings
from experiments.warm import MODEL, ChatAgent, WarmTurns, median_interval, percentile

URL = "http://127.0.0.1:8000"
NONE = "none"
_CHAT = "/v1/chat/completions"
_COMPLETION = "/v1/completions"
# Room for the rest of a body beside what fills it.
_SLACK_BYTES = 1024


@dataclass(frozen=True)
class Unkind:
    """One kind of request: a path, and a body or None."""

    path: str
    body: bytes | None


def _chat(**fields: Any) -> bytes:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    return json.dumps(body | fields).encode()


def _completion(prompt: Any) -> bytes:
    return json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 1}).encode()


def _nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth - 1):
        value = [value]
    return value


def kinds(most_bytes: int) -> dict[str, Unkind]:
    """The requests, by what they are made of.

    Args:
        most_bytes: the longest body that the router takes.
    """
    room = most_bytes - _SLACK_BYTES
    deep = budget.DEEPEST - 3
    messages = [{"role": "user", "content": "a few words of it"}] * budget.MOST_ITEMS
    return {
        "longest text": Unkind(
            _CHAT, _chat(messages=[{"role": "user", "content": "a " * (room // 2)}])
        ),
        "most arrays, unbounded": Unkind(_CHAT, b'{"messages":[' + b"[]," * (room // 3) + b"[]]}"),
        "most values": Unkind(_CHAT, _chat(tools=[[0] * 127] * (budget.MOST_VALUES // 128 - 1))),
        # The engine refuses the temperature.
        "deepest": Unkind(
            _CHAT,
            _chat(metadata=[_nested(deep)] * (budget.MOST_CONTAINERS // deep - 1), temperature=-1),
        ),
        "most messages": Unkind(_CHAT, _chat(messages=messages)),
        "most token ids": Unkind(_COMPLETION, _completion([1] * budget.MOST_TOKEN_IDS)),
        "most prompts": Unkind(_COMPLETION, _completion(["a b " * 10_000] * budget.MOST_CHOICES)),
        "most listed": Unkind("/v1/conversations?limit=10000", None),
    }


def _send_for_ever(url: str, unkind: Unkind, connections: int, counts: Any) -> None:
    """The unkind clients' process; ``counts`` gets a status for each answer, and never blocks."""
    os.nice(19)

    async def one(session: aiohttp.ClientSession) -> None:
        headers = {"Content-Type": "application/json"}
        while True:
            try:
                if unkind.body is None:
                    request = session.get(url + unkind.path)
                else:
                    request = session.post(url + unkind.path, data=unkind.body, headers=headers)
                async with request as response:
                    await response.read()
                    counts.put(response.status)
            except aiohttp.ClientError as error:
                # The router may refuse a body before it has read it, and close.
                counts.put(type(error).__name__)

    async def all_of_them() -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
            await asyncio.gather(*(one(session) for _ in range(connections)))

    asyncio.run(all_of_them())


def _first_answer(process: Any, counts: Any) -> Any:
    """The unkind clients' first answer, once there is one."""
    while process.is_alive():
        try:
            return counts.get(timeout=1)
        except queue.Empty:
            continue
    raise RuntimeError("the unkind clients' process has ended; see its error above")


@dataclass
class Seen:
    """Holds the others' p95 of time between tokens beside one kind of client, a number a round."""

    p95_s: list[float] = field(default_factory=list)
    answers: Counter[str] = field(default_factory=Counter)


async def _phase(agents: list[ChatAgent], seconds: float) -> float:
    """P95 of the time between tokens while agents take turns for so long."""
    samples = WarmTurns()
    ends_s = time.monotonic() + seconds

    async def turns(agent: ChatAgent) -> None:
        while time.monotonic() < ends_s:
            await agent.warm_turn(samples)

    await asyncio.gather(*(turns(agent) for agent in agents))
    return percentile(samples.tbt_s, 0.95)


async def measure(
    url: str,
    all_kinds: dict[str, Unkind],
    options: argparse.Namespace,
    advance: Callable[[], None],
) -> dict[str, Seen]:
    """Go through the kinds, round after round."""
    order = random.Random(options.seed)
    seen = {name: Seen() for name in (NONE, *all_kinds)}
    spawn = multiprocessing.get_context("spawn")
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        agents = [
            ChatAgent(session, url, f"kind-{options.seed}-{n}") for n in range(options.agents)
        ]
        await _phase(agents, options.seconds)
        for _ in range(options.rounds):
            for name in order.sample(list(seen), len(seen)):
                counts = spawn.Queue()
                arguments = (url, all_kinds.get(name), options.connections, counts)
                process = spawn.Process(target=_send_for_ever, args=arguments, daemon=True)
                if name != NONE:
                    process.start()
                    first = await asyncio.to_thread(_first_answer, process, counts)
                    seen[name].answers[str(first)] += 1
                try:
                    seen[name].p95_s.append(await _phase(agents, options.seconds))
                finally:
                    if name != NONE:
                        process.kill()
                        process.join()
                while not counts.empty():
                    seen[name].answers[str(counts.get())] += 1
                advance()
    return seen


def difference(seen: Seen, calm: Seen) -> tuple[float, float, float]:
    """Median over rounds of what this kind adds to p95, and its 95 % interval, in seconds."""
    more = [with_s - without_s for with_s, without_s in zip(seen.p95_s, calm.p95_s, strict=True)]
    return median_interval(more)


def report(seen: dict[str, Seen], console: Console) -> None:
    """Print the table."""
    table = Table(title="others' time between tokens, p95, milliseconds")
    for column in ("unkind clients send", "p95", "more than with none", "95 %", "answers"):
        table.add_column(column, justify="left" if column in ("answers",) else "right")
    for name, one in seen.items():
        more, low, high = difference(one, seen[NONE])
        answers = ", ".join(f"{count} of {what}" for what, count in one.answers.most_common(3))
        p95 = f"{statistics.median(one.p95_s) * 1000:.1f}"
        change = (
            ["", ""]
            if name == NONE
            else [f"{more * 1000:+.1f}", f"{low * 1000:+.1f} to {high * 1000:+.1f}"]
        )
        table.add_row(name, p95, *change, answers)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each kind in each round")
    parser.add_argument("--agents", type=int, default=2)
    parser.add_argument("--connections", type=int, default=2, help="of unkind clients")
    parser.add_argument("--kinds", nargs="+", help="only these")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console = new_console(least_width=110)
    logs = Path(tempfile.mkdtemp(prefix="conserve-unkind-"))
    all_kinds = kinds(Settings().max_body_bytes)
    if options.kinds:
        all_kinds = {name: all_kinds[name] for name in options.kinds}
    with Launch(["decoders=1"], logs / "conserve.log") as launch:
        with console.status(f"starting ConServe (logs: {logs})"):
            launch.wait_until_serving(URL, 1, 1)
        with Progress(console=console) as progress:
            total = options.rounds * (len(all_kinds) + 1)
            task = progress.add_task("phases", total=total)
            seen = asyncio.run(measure(URL, all_kinds, options, lambda: progress.advance(task)))
    report(seen, console)
    if options.json:
        body = {
            name: {
                "p95_s": one.p95_s,
                "answers": one.answers,
                "more_s": difference(one, seen[NONE]),
            }
            for name, one in seen.items()
        }
        options.json.write_text(json.dumps(body) + "\n")


if __name__ == "__main__":
    main()
