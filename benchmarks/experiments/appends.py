"""Measures what others feel of a large append that is prefilled at home, or by elastic placement.

    python -m benchmarks.experiments.appends [--rounds 10] [--tokens 8000] [--json PATH]

One application with elastic placement (one prefiller, one decoder, float32, 512 tokens in a step),
and before it two routers, one of which never asks where a turn that appends much is prefilled. On
the decoder others' answers are streamed all the time. In each round, through each router in random
order, a conversation that lives there, too, and has had its first turn, appends so many tokens.
Reported are the others' times between tokens from when that turn is sent until its first token, the
turn's own TTFT, what its decoder took over, and whether it gave the same answer through both.
Ratios are medians over rounds, with a bootstrap interval of 95 %.
"""

import argparse
import asyncio
import json
import random
import time
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
from benchmarks.peers.pinning import autogroup_warning, engine_processes, pin
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
# Of each of the others': as many as there is room for, so that they last.
_OTHERS_TOKENS = 30_000
# New conversations go elsewhere for a while after an engine has computed much for its own.
_AGAIN_S = 5.0
_MOST_TRIES = 30


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


@dataclass
class Answer:
    """An answer as it is streamed.

    Attributes:
        engine: where its conversation lives; empty before it has begun.
        arrivals_s: of its parts that have text.
    """

    engine: str = ""
    text: str = ""
    arrivals_s: list[float] = field(default_factory=list)


async def say(
    session: aiohttp.ClientSession,
    url: str,
    name: str,
    messages: list[Any],
    tokens: int,
    answer: Answer,
) -> Answer:
    """Have a conversation's messages answered; the answer, which grows meanwhile."""
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
        answer.engine = response.headers["x-conserve-decoder"]
        async for line in response.content:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    if text := choice["delta"].get("content"):
                        answer.text += text
                        answer.arrivals_s.append(time.perf_counter())
    return answer


class Others:
    """Answers that are streamed all the time."""

    def __init__(self, session: aiohttp.ClientSession, url: str, count: int) -> None:
        self._answers = [Answer() for _ in range(count)]
        self._tasks = []
        for number, answer in enumerate(self._answers):
            name = f"other-{number}"
            messages = [{"role": "user", "content": f"{name}: go on and on"}]
            saying = say(session, url, name, messages, _OTHERS_TOKENS, answer)
            self._tasks.append(asyncio.create_task(saying))

    async def engine(self) -> str:
        """Return where they live, once all have begun.

        Raises:
            RuntimeError: one has ended, or they are apart.
        """
        while not all(answer.arrivals_s for answer in self._answers):
            await asyncio.sleep(0.05)
            self.require_all()
        engines = {answer.engine for answer in self._answers}
        if len(engines) > 1:
            raise RuntimeError("the others live on several engines; start again with fewer")
        return engines.pop()

    def require_all(self) -> None:
        """Make sure that all go on.

        Raises:
            RuntimeError: one has ended.
        """
        for task in self._tasks:
            if task.done():
                task.result()
                raise RuntimeError("an answer has come to its end; measure fewer rounds")

    def gaps_s(self, from_s: float, to_s: float) -> list[float]:
        """Times between tokens that were over, or begun, in between."""
        return [
            later_s - earlier_s
            for answer in self._answers
            for earlier_s, later_s in pairwise(answer.arrivals_s)
            if later_s >= from_s and earlier_s <= to_s
        ]

    async def stop(self) -> None:
        """Leave them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class Appending:
    """Turns that append much, where the others live."""

    def __init__(
        self, session: aiohttp.ClientSession, others: Others, options: argparse.Namespace
    ) -> None:
        self._session = session
        self._others = others
        self._options = options

    async def measure(self, url: str, mark: str, round_: int, result: Appended | None) -> None:
        """One such turn through a router.

        Args:
            mark: tells the conversations of different routers apart.
            round_: says what is appended.
            result: gets what is found; None: it does not count.
        """
        rng = random.Random(f"{self._options.seed}-{round_}")

        def prompt(tokens: int) -> dict[str, str]:
            return {"role": "user", "content": " ".join(rng.choices(WORDS, k=tokens))}

        first, more = prompt(_FIRST_TOKENS), prompt(self._options.tokens)
        name, answer = await self._begin(url, f"{mark}-{round_}", first)
        messages = [first, {"role": "assistant", "content": answer.text}, more]
        sent_s = time.perf_counter()
        answer = await say(self._session, url, name, messages, _ANSWER_TOKENS, Answer())
        first_s = answer.arrivals_s[0]
        gaps_s = self._others.gaps_s(sent_s, first_s)
        self._others.require_all()
        async with self._session.get(f"{url}/v1/conversations/{name}") as response:
            seen = await response.json()
        await self._end(url, name)
        if result is not None:
            result.ttft_s.append(first_s - sent_s)
            result.others_p95_s.append(percentile(gaps_s, 0.95))
            result.others_most_s.append(max(gaps_s))
            result.taken_tokens.append(int(seen["last_turn"]["lmcache_tokens"]))
            result.answers.append(answer.text)

    async def _begin(self, url: str, name: str, first: dict[str, str]) -> tuple[str, Answer]:
        """A conversation where the others live; its name, and its first answer."""
        wanted = await self._others.engine()
        for number in range(_MOST_TRIES):
            own = f"{name}-{number}"
            answer = await say(self._session, url, own, [first], _ANSWER_TOKENS, Answer())
            if answer.engine == wanted:
                return own, answer
            await self._end(url, own)
            await asyncio.sleep(_AGAIN_S)
        raise RuntimeError(f"of {_MOST_TRIES} conversations none came to where the others live")

    async def _end(self, url: str, name: str) -> None:
        async with self._session.delete(f"{url}/v1/conversations/{name}") as response:
            await response.read()


async def measure(
    urls: dict[str, str], options: argparse.Namespace, progress: Progress
) -> dict[str, Appended]:
    """Alternate the routers, round after round, after one that does not count."""
    order = random.Random(options.seed)
    results = {name: Appended() for name in urls}
    task = progress.add_task("rounds", total=options.rounds)
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        others = Others(session, urls[HOME], options.others)
        try:
            appending = Appending(session, others, options)
            for round_ in range(options.rounds + 1):
                names = list(urls)
                order.shuffle(names)
                for name in names:
                    mark = f"door{list(urls).index(name)}"
                    result = results[name] if round_ else None
                    await appending.measure(urls[name], mark, round_, result)
                if round_:
                    progress.advance(task)
        finally:
            await others.stop()
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
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=8_000, help="that a turn appends")
    parser.add_argument("--others", type=int, default=4, help="answers that are streamed meanwhile")
    parser.add_argument(
        "--cores", metavar="0,1", help="cores to pin engines to, one each, as if they were apart"
    )
    parser.add_argument("--json", type=Path, help="file for everything that was measured")
    parser.add_argument("--door", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--home", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.door is not None:
        # A router reads `pausing` for nothing but this.
        doors.serve(options.door, Settings(placement="elastic", pausing=not options.home))
        return
    console = new_console(least_width=150)
    if options.cores is not None and (problem := autogroup_warning()):
        console.print(f"[yellow]{problem}[/yellow]", highlight=False)
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
