"""Warm turns: agents that take them, systems that are measured in turn, ratios and tables.

A system's turns are those of `ChatAgent`s, `ROUND_TURNS` of them in a round or as many as there are
clients, and the systems alternate in random order, round after round. The first turn of a
conversation is run and not measured. TBT is the time between a stream's parts, so a server that
sends several tokens at a time shows fewer and longer ones. A ratio is the median over rounds of one
system's median within a round against another's in the same round, with a bootstrap interval of
95 %: a machine's noise is larger than most differences.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.hogs import hogs

MODEL = "conserve-embedded"
TURNS = 8
_LATER_WORDS = 30
# Turns of one system in one round, over all its clients.
ROUND_TURNS = 4
_WARM_UP_ROUNDS = 2
_BOOTSTRAP_DRAWS = 2000
WORDS = (
    "open",
    "close",
    "read",
    "write",
    "file",
    "class",
    "return",
    "import",
    "value",
    "index",
    "print",
    "while",
    "yield",
)


class Load(NamedTuple):
    """How many turns at a time, beside how many processes that want cores."""

    clients: int
    hogs: int = 0

    def __str__(self) -> str:
        beside = f", {self.hogs} CPU hog{'s' * (self.hogs != 1)}" if self.hogs else ""
        return f"{self.clients} client{'s' * (self.clients != 1)}{beside}"


class Size(NamedTuple):
    """How long turns are.

    Attributes:
        first_words: of a conversation's first prompt, which its later turns go on from.
        output_tokens: of each answer.
    """

    first_words: int = 400
    output_tokens: int = 64


USUAL = Size()


# By load, and by system.
Results = dict[Load, dict[str, "WarmTurns"]]


@dataclass
class WarmTurns:
    """Warm turns of one system with one number of clients; times in seconds."""

    latency_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    tbt_s: list[float] = field(default_factory=list)
    round_median_s: list[float] = field(default_factory=list)
    round_ttft_s: list[float] = field(default_factory=list)

    def add(self, turns: "WarmTurns") -> None:
        """A round's turns."""
        self.latency_s += turns.latency_s
        self.ttft_s += turns.ttft_s
        self.tbt_s += turns.tbt_s
        self.round_median_s.append(statistics.median(turns.latency_s))
        self.round_ttft_s.append(statistics.median(turns.ttft_s))


class ChatAgent:
    """One agent: a conversation of `TURNS` turns after another, with every system the same."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        seed: str,
        headers: Mapping[str, str] | None = None,
        size: Size = USUAL,
    ) -> None:
        self._headers = headers or {}
        self._size = size
        self._session = session
        self._url = url
        self._seed = seed
        self._rng = random.Random(seed)
        self._number = 0
        self._messages: list[dict[str, str]] = []
        self._left = 0

    async def warm_turn(self, samples: WarmTurns | None) -> None:
        """Run one later turn; a new conversation's first turn goes before it, unmeasured."""
        if self._left == 0:
            self._left = TURNS
            self._number += 1
            self._messages = []
            await self._turn(self._size.first_words, None)
        self._left -= 1
        await self._turn(_LATER_WORDS, samples)

    async def prepare(self) -> None:
        """Have the next turn be a warm one."""
        if self._left == 0:
            await self.warm_turn(None)

    async def _turn(self, words: int, samples: WarmTurns | None) -> None:
        prompt = " ".join(self._rng.choice(WORDS) for _ in range(words))
        self._messages.append({"role": "user", "content": prompt})
        body = {
            "model": MODEL,
            "messages": self._messages,
            "max_tokens": self._size.output_tokens,
            "min_tokens": self._size.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers = {**self._headers, "X-Conversation-Id": f"{self._seed}-{self._number}"}
        raw = json.dumps(body).encode()
        headers["Content-Type"] = "application/json"
        parts: list[bytes] = []
        arrivals: list[float] = []
        started_s = time.perf_counter()
        async with self._session.post(
            self._url + "/v1/chat/completions", data=raw, headers=headers
        ) as response:
            async for part in response.content.iter_any():
                arrivals.append(time.perf_counter())
                parts.append(part)
        ended_s = time.perf_counter()
        if response.status != 200:
            raise RuntimeError(f"{self._url}: {response.status} {b''.join(parts)[:300]!r}")
        # The answer is parsed after the clock has stopped.
        content, tokens = _content(b"".join(parts))
        if tokens != self._size.output_tokens:
            raise RuntimeError(f"{self._url}: {tokens} tokens, not {self._size.output_tokens}")
        self._messages.append({"role": "assistant", "content": content})
        if samples is not None:
            samples.latency_s.append(ended_s - started_s)
            samples.ttft_s.append(arrivals[0] - started_s)
            samples.tbt_s += [later - earlier for earlier, later in pairwise(arrivals)]


def _content(stream: bytes) -> tuple[str, int]:
    """A streamed answer's text and number of tokens."""
    text: list[str] = []
    tokens = 0
    for line in stream.split(b"\n"):
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            text += [choice["delta"].get("content") or "" for choice in event["choices"]]
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    return "".join(text), tokens


def measure(
    systems: Mapping[str, str],
    rounds: int,
    loads: Iterable[Load],
    progress: Progress,
    seed: int,
    headers: Mapping[str, Mapping[str, str]] | None = None,
    size: Size = USUAL,
) -> Results:
    """Have systems take turns under each load.

    Args:
        systems: their URLs, by name.
        headers: what a system's requests carry, by its name.
    """
    results = {}
    for load in loads:
        with hogs(load.hogs):
            results[load] = asyncio.run(
                _alternate(systems, load, rounds, progress, seed, headers or {}, size)
            )
    return results


async def _alternate(
    systems: Mapping[str, str],
    load: Load,
    rounds: int,
    progress: Progress,
    seed: int,
    headers: Mapping[str, Mapping[str, str]],
    size: Size,
) -> dict[str, WarmTurns]:
    order = random.Random(seed)
    results = {name: WarmTurns() for name in systems}
    task = progress.add_task(str(load), total=rounds)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=120)
    ) as session:
        agents = {
            name: [
                ChatAgent(
                    session,
                    url,
                    f"{seed}-{load.clients}-{load.hogs}-{n}",
                    headers.get(name),
                    size,
                )
                for n in range(load.clients)
            ]
            for name, url in systems.items()
        }
        for number in range(rounds + _WARM_UP_ROUNDS):
            names = list(systems)
            order.shuffle(names)
            for name in names:
                here = WarmTurns()
                while len(here.latency_s) < ROUND_TURNS:
                    await asyncio.gather(*(agent.prepare() for agent in agents[name]))
                    await asyncio.gather(*(agent.warm_turn(here) for agent in agents[name]))
                if number >= _WARM_UP_ROUNDS:
                    results[name].add(here)
            if number >= _WARM_UP_ROUNDS:
                progress.advance(task)
    return results


def paired_ratio(system: Sequence[float], base: Sequence[float]) -> tuple[float, float, float]:
    """Median over rounds of one system's median against another's.

    Args:
        system: each round's.
        base: those of the other one, in the same rounds.

    Returns:
        The ratio, and the ends of its 95 % interval (bootstrap over rounds).
    """
    return median_interval([mine / theirs for mine, theirs in zip(system, base, strict=True)])


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and the ends of its 95 % interval (bootstrap over the values)."""
    draw = random.Random(0)
    medians = sorted(
        statistics.median(draw.choices(values, k=len(values))) for _ in range(_BOOTSTRAP_DRAWS)
    )
    return statistics.median(values), percentile(medians, 0.025), percentile(medians, 0.975)


def percentile(values: Iterable[float], q: float) -> float:
    """The q-th quantile, by the nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def report(results: Results, console: Console, base: str) -> None:
    """Print a table for each load, with ratios to the system ``base``."""
    for load, systems in results.items():
        table = Table(title=f"{load}, warm turns, milliseconds")
        table.add_column("system", no_wrap=True)
        for column in (
            *("latency ratio", "95 %", "TTFT ratio", "95 %"),
            *("latency p50", "p95", "TTFT p50", "p95", "TBT p50", "p95"),
        ):
            table.add_column(column, justify="right", no_wrap=True)
        for name, samples in systems.items():
            cells = []
            for mine, theirs in (
                (samples.round_median_s, systems[base].round_median_s),
                (samples.round_ttft_s, systems[base].round_ttft_s),
            ):
                ratio, low, high = paired_ratio(mine, theirs)
                cells += [f"{ratio:.3f}", "" if name == base else f"{low:.3f}-{high:.3f}"]
            for values in (samples.latency_s, samples.ttft_s, samples.tbt_s):
                cells += [f"{percentile(values, q) * 1000:.1f}" for q in (0.5, 0.95)]
            table.add_row(name, *cells)
        console.print(table)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of every experiment with warm turns."""
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8])
    parser.add_argument(
        "--hogs", type=int, nargs="+", default=[0], help="processes beside it that want cores"
    )
    parser.add_argument(
        "--first-words",
        type=int,
        default=USUAL.first_words,
        help="length of a conversation's first prompt, which later turns go on from (%(default)s)",
    )
    parser.add_argument(
        "--output-tokens",
        type=int,
        default=USUAL.output_tokens,
        help="length of each answer (%(default)s)",
    )
    parser.add_argument("--json", type=Path, help="file for everything that was measured")


def loads(options: argparse.Namespace) -> list[Load]:
    """Return the loads that `add_options` was told."""
    return [Load(clients, hog) for hog, clients in product(options.hogs, options.clients)]


def size(options: argparse.Namespace) -> Size:
    """Return the size that `add_options` was told."""
    return Size(options.first_words, options.output_tokens)


def write_json(path: Path, options: argparse.Namespace, results: Results, base: str) -> None:
    """Write ratios of latency to the system ``base``, and every sample, in seconds."""
    body: dict[str, Any] = {
        "options": {key: str(value) for key, value in vars(options).items()},
        "ratios": {
            str(load): {
                name: paired_ratio(samples.round_median_s, found[base].round_median_s)
                for name, samples in found.items()
            }
            for load, found in results.items()
        },
        "samples": {
            str(load): {name: asdict(samples) for name, samples in found.items()}
            for load, found in results.items()
        },
    }
    path.write_text(json.dumps(body) + "\n")
