"""What others feel of a large append: it is prefilled at home, or where all wait least for it.

    python -m benchmarks.experiments.appends [--rounds 20] [--tokens 8000] [--json PATH]

One application with elastic placement (one prefiller, one decoder, float32, 512 tokens in a step),
and before it two routers, one of which never asks where a turn that appends much is prefilled. In
each round, through each of them in random order, a conversation that has had its first turn appends
so many tokens while others' answers are streamed. Reported are the others' times between tokens
from when that turn is sent until its first token, the turn's own TTFT, what its decoder took over,
and whether it gave the same answer through both. Ratios are medians over rounds, with a bootstrap
interval of 95 %.
"""

import argparse
import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.experiments import doors
from benchmarks.experiments.doors import Door
from benchmarks.experiments.warm import MODEL, WORDS, paired_ratio, percentile
from benchmarks.peers.pinning import engine_processes, pin
from conserve.console import new_console
from conserve.settings import Settings

HOME, WHEREVER = "at home", "wherever all wait least"
_SETTINGS = (
    "placement=elastic",
    "engine.dtype=float32",
    "engine.max_model_len=32768",
    "engine.max_num_batched_tokens=512",
)
_FIRST_TOKENS = 1_000
_ANSWER_TOKENS = 16
# Of each of the others': none ends while a turn is measured.
_OTHERS_TOKENS = 8_000
_SETTLE_S = 2.0


@dataclass
class Appended:
    """Turns that append much, through one router; a number a round, times in seconds.

    Attributes:
        others_p95_s, others_most_s: of the others' times between tokens meanwhile.
        taken_tokens: what the decoder took over from elsewhere.
    """

    ttft_s: list[float] = field(default_factory=list)
    others_p95_s: list[float] = field(default_factory=list)
    others_most_s: list[float] = field(default_factory=list)
    taken_tokens: list[int] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)


async def _stream(
    session: aiohttp.ClientSession, url: str, name: str, messages: list[Any], tokens: int
) -> AsyncIterator[str]:
    """The parts of an answer's text as they come."""
    body = {
        "model": MODEL,
        "messages": messages,
        "max_tokens": tokens,
        "min_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        # The same prompts come through each router, and none finds what another has left.
        "cache_salt": name,
    }
    headers = {"X-Conversation-Id": name}
    async with session.post(url + "/v1/chat/completions", json=body, headers=headers) as response:
        if response.status != 200:
            raise RuntimeError(f"{url}: {response.status} {await response.text()}")
        async for line in response.content:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    yield choice["delta"].get("content") or ""


class Others:
    """Answers that are streamed meanwhile, and when their tokens came."""

    def __init__(self, session: aiohttp.ClientSession, url: str, seed: str, count: int) -> None:
        self._arrivals: list[list[float]] = [[] for _ in range(count)]
        self._tasks = [
            asyncio.create_task(self._stream(session, url, f"{seed}-other-{n}", n))
            for n in range(count)
        ]

    async def under_way(self) -> None:
        """Return when all have put something out."""
        while not all(len(arrivals) > 1 for arrivals in self._arrivals):
            for task in self._tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(0.05)

    def gaps_s(self, from_s: float, to_s: float) -> list[float]:
        """Times between tokens that ended in between."""
        return [
            later - earlier
            for arrivals in self._arrivals
            for earlier, later in pairwise(arrivals)
            if later >= from_s and earlier <= to_s
        ]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _stream(
        self, session: aiohttp.ClientSession, url: str, name: str, number: int
    ) -> None:
        messages = [{"role": "user", "content": f"{name}: go on and on"}]
        async for _ in _stream(session, url, name, messages, _OTHERS_TOKENS):
            self._arrivals[number].append(time.perf_counter())


async def append(
    session: aiohttp.ClientSession, url: str, seed: str, round_: int, options: argparse.Namespace
) -> tuple[float, list[float], int, str]:
    """One turn that appends much, while others' answers are streamed.

    Args:
        seed: tells conversations of different routers apart.

    Returns:
        Its TTFT, the others' times between tokens, what its decoder took over, and the answer.
    """
    rng = random.Random(f"{options.seed}-{round_}")
    name = f"{seed}-{options.seed}-{round_}"

    def prompt(tokens: int) -> dict[str, str]:
        return {"role": "user", "content": " ".join(rng.choices(WORDS, k=tokens))}

    messages = [prompt(_FIRST_TOKENS)]
    said = [part async for part in _stream(session, url, name, messages, _ANSWER_TOKENS)]
    messages += [{"role": "assistant", "content": "".join(said)}, prompt(options.tokens)]
    others = Others(session, url, name, options.others)
    try:
        await others.under_way()
        await asyncio.sleep(_SETTLE_S)
        sent_s = time.perf_counter()
        first_s, answer = None, ""
        async for part in _stream(session, url, name, messages, _ANSWER_TOKENS):
            first_s = first_s or time.perf_counter()
            answer += part
        assert first_s is not None
        # A gap that the turn has made ends with the next token.
        await asyncio.sleep(0.2)
        gaps_s = others.gaps_s(sent_s, first_s)
    finally:
        await others.stop()
    async with session.get(f"{url}/v1/conversations/{name}") as response:
        seen = await response.json()
    for one in (name, *(f"{name}-other-{n}" for n in range(options.others))):
        async with session.delete(f"{url}/v1/conversations/{one}") as response:
            await response.read()
    return first_s - sent_s, gaps_s, int(seen["last_turn"]["lmcache_tokens"]), answer


async def measure(
    urls: dict[str, str], options: argparse.Namespace, progress: Progress
) -> dict[str, Appended]:
    """Alternate the routers, round after round, after one that does not count."""
    order = random.Random(options.seed)
    results = {name: Appended() for name in urls}
    task = progress.add_task("rounds", total=options.rounds)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        for round_ in range(options.rounds + 1):
            names = list(urls)
            order.shuffle(names)
            for name in names:
                seed = f"door{list(urls).index(name)}"
                found = await append(session, urls[name], seed, round_, options)
                ttft_s, gaps_s, taken_tokens, answer = found
                if round_ == 0:
                    continue
                result = results[name]
                result.ttft_s.append(ttft_s)
                result.others_p95_s.append(percentile(gaps_s, 0.95))
                result.others_most_s.append(max(gaps_s))
                result.taken_tokens.append(taken_tokens)
                result.answers.append(answer)
            if round_:
                progress.advance(task)
    return results


def report(results: dict[str, Appended], tokens: int, console: Console) -> None:
    """Print a table with ratios to the turns that are prefilled at home."""
    home = results[HOME]
    table = Table(title=f"{tokens:,} tokens appended, medians over rounds, milliseconds")
    table.add_column("prefilled", no_wrap=True)
    for column in (
        *("others' p95", "ratio", "95 %", "longest", "ratio", "95 %"),
        *("its TTFT", "ratio", "95 %", "taken over", "same answers"),
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for name, found in results.items():
        cells = []
        for mine, theirs in (
            (found.others_p95_s, home.others_p95_s),
            (found.others_most_s, home.others_most_s),
            (found.ttft_s, home.ttft_s),
        ):
            ratio, low, high = paired_ratio(mine, theirs)
            cells += [
                f"{percentile(mine, 0.5) * 1000:.1f}",
                f"{ratio:.2f}",
                "" if found is home else f"{low:.2f}-{high:.2f}",
            ]
        same = sum(mine == theirs for mine, theirs in zip(found.answers, home.answers, strict=True))
        taken_tokens = percentile(found.taken_tokens, 0.5)
        table.add_row(name, *cells, f"{taken_tokens:,.0f}", f"{same} of {len(found.answers)}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=8_000, help="that a turn appends")
    parser.add_argument("--others", type=int, default=6, help="answers that are streamed meanwhile")
    parser.add_argument(
        "--cores", metavar="0,1", help="cores to pin engines to, one each, as if they were apart"
    )
    parser.add_argument("--json", type=Path, help="file for everything that was measured")
    parser.add_argument("--door", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--home", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.door is not None:
        # A router reads `parking` for nothing but this.
        doors.serve(options.door, Settings(placement="elastic", parking=not options.home))
        return
    console = new_console(least_width=150)
    both = [Door(HOME, 8191, ("--home",)), Door(WHEREVER, 8192)]
    folder = doors.new_folder("appends")
    module = "benchmarks.experiments.appends"
    with doors.opened(module, both, folder, console, _SETTINGS) as urls:
        if options.cores is not None:
            pin(engine_processes(), [int(core) for core in options.cores.split(",")])
        with Progress(console=console) as progress:
            results = asyncio.run(measure(urls, options, progress))
        report(results, options.tokens, console)
    if options.json:
        found = {name: asdict(one) for name, one in results.items()}
        options.json.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
