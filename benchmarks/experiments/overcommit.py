"""Agents whose histories are several times what engines can hold: throughput, and what is found.

    python -m benchmarks.experiments.overcommit [--times 1,2,3,4] [--out FOLDER]

One system after the other is started, each with the same engines and room for the same KV. So many
agents work at a time that their histories take that room once, twice and so on: each sends a long
first prompt, then turns that append a little, with gaps between as tools take, and when it has made
all of its turns it begins anew, without a word about the old one. For each number of agents there
are output tokens a second, and the share of what a later turn repeats that no engine had to compute
(by ``usage``). A turn that is refused counts, and is sent again a second later.
"""

import argparse
import asyncio
import contextlib
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import matplotlib

matplotlib.use("Agg")

from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from benchmarks.experiments.warm import MODEL, percentile
from benchmarks.peers import Options, PeerUnavailable, start
from benchmarks.peers.plan import CONVERSATION_HEADER
from conserve.console import new_console
from conserve.launch import Launch

PORT = 8000
URL = f"http://127.0.0.1:{PORT}"
CONSERVE, PINNED = "conserve", "pausing-off"
RAY, ROUTER, BARE = "ray_serve_llm", "vllm_router", "vllm"
SYSTEMS = (CONSERVE, PINNED, RAY, ROUTER, BARE)
_SETTINGS = {CONSERVE: (), PINNED: ("pausing=off",)}
_BLOCK_TOKENS = 128
# vLLM refuses a longer one than its KV space can hold.
_MAX_MODEL_LEN = 4096
_RETRY_S = 1.0
_WORDS = ("open", "close", "read", "write", "file", "class", "return", "import", "value", "index")


@dataclass(frozen=True, slots=True)
class Shape:
    """Tells what an agent does: a first prompt, turns that append to it, and its tools' time.

    Lengths are in words, of about a token each, but for `output_tokens`.
    """

    first_words: int = 1500
    later_words: int = 100
    output_tokens: int = 24
    turns: int = 8
    gap_s: float = 1.0

    @property
    def mean_tokens(self) -> int:
        """How long a history is, halfway."""
        return self.first_words + (self.later_words + self.output_tokens) * self.turns // 2


@dataclass(slots=True)
class Level:
    """Tells what was seen of a system with so many agents.

    Attributes:
        seconds: for how long it was looked at.
        output_tokens: of turns that ended in that time.
        repeated_tokens, found_tokens: of later turns' prompts, what had been sent or answered
            before, and what of the prompt was found in caches.
        refused: answers other than 200, by their status.
        latency_s: of each turn, from when it was sent first.
    """

    agents: int
    seconds: float
    output_tokens: int = 0
    repeated_tokens: int = 0
    found_tokens: int = 0
    refused: dict[int, int] = field(default_factory=dict)
    latency_s: list[float] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second."""
        return self.output_tokens / self.seconds

    @property
    def found(self) -> float:
        """The share of what was repeated that no engine had to compute."""
        return self.found_tokens / self.repeated_tokens if self.repeated_tokens else 0.0

    def add(self, usage: dict[str, Any], repeated_tokens: int, latency_s: float) -> None:
        """A turn has ended.

        Args:
            usage: the answer's.
            repeated_tokens: how long the one before was, answer included; 0 for a first turn.
        """
        self.output_tokens += usage["completion_tokens"]
        self.latency_s.append(latency_s)
        if repeated_tokens:
            details = usage.get("prompt_tokens_details") or {}
            self.repeated_tokens += repeated_tokens
            # The engine may share what was never sent, as a template's first words.
            self.found_tokens += min(repeated_tokens, details.get("cached_tokens") or 0)


@dataclass(slots=True)
class Window:
    """When it is counted: `level` is None before."""

    level: Level | None = None


class Agent:
    """One client: a conversation after another, until it is stopped.

    Args:
        header: by which the system tells conversations apart.
    """

    def __init__(
        self, session: aiohttp.ClientSession, shape: Shape, seed: str, header: str
    ) -> None:
        self._session = session
        self._header = header
        self._shape = shape
        self._rng = random.Random(seed)
        self._seed = seed

    async def work(self, window: Window) -> None:
        """Make turns for ever; those that end while it is counted are."""
        number = 0
        await asyncio.sleep(self._rng.uniform(0, self._shape.gap_s))
        while True:
            number += 1
            messages: list[dict[str, str]] = []
            before = 0
            for turn in range(self._shape.turns):
                words = self._shape.later_words if turn else self._shape.first_words
                prompt = " ".join(self._rng.choice(_WORDS) for _ in range(words))
                messages.append({"role": "user", "content": prompt})
                content, before = await self._turn(
                    f"{self._seed}-{number}", messages, before, window
                )
                messages.append({"role": "assistant", "content": content})
                await asyncio.sleep(self._rng.expovariate(1 / self._shape.gap_s))

    async def _turn(
        self,
        name: str,
        messages: list[dict[str, str]],
        before: int,
        window: Window,
    ) -> tuple[str, int]:
        tokens = self._shape.output_tokens
        body = {
            "model": MODEL,
            "messages": messages,
            "max_tokens": tokens,
            "min_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
        }
        headers = {self._header: name}
        began_s = time.perf_counter()
        while True:
            async with self._session.post(
                URL + "/v1/chat/completions", json=body, headers=headers
            ) as response:
                answer = await response.json(content_type=None)
            here = window.level
            if response.status == 200:
                usage = answer["usage"]
                if here is not None:
                    here.add(usage, before, time.perf_counter() - began_s)
                return answer["choices"][0]["message"]["content"], usage["total_tokens"]
            if here is not None:
                here.refused[response.status] = here.refused.get(response.status, 0) + 1
            await asyncio.sleep(_RETRY_S)


async def measure(
    counts: Sequence[int],
    shape: Shape,
    settle_s: float,
    seconds: float,
    seed: int,
    header: str,
    advance: Callable[[], None],
) -> list[Level]:
    """One number of agents after the other; the first ``settle_s`` of each are not counted."""
    levels = []
    timeout = aiohttp.ClientTimeout(total=600)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        for count in counts:
            window = Window()
            names = (f"{seed}-{count}-{n}" for n in range(count))
            agents = [Agent(session, shape, name, header) for name in names]
            tasks = [asyncio.ensure_future(agent.work(window)) for agent in agents]
            _, working = await asyncio.wait(tasks, timeout=settle_s)
            window.level = Level(count, seconds)
            if len(working) == len(tasks):
                _, working = await asyncio.wait(tasks, timeout=seconds)
            for task in working:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            for error in ended:
                # An agent works for ever: one that does not, has failed.
                if not isinstance(error, asyncio.CancelledError):
                    raise error if isinstance(error, BaseException) else AssertionError(error)
            levels.append(window.level)
            advance()
    return levels


@contextlib.contextmanager
def serving(system: str, blocks: int, logs: Path, report: Callable[[str], None]) -> Iterator[str]:
    """Have a system up for the time of a ``with`` block.

    Args:
        blocks: of KV, of each engine; a bare engine has those of two.

    Yields:
        The header by which it tells conversations apart.

    Raises:
        PeerUnavailable: it cannot run here.
    """
    engine = {"num_gpu_blocks_override": blocks, "max_model_len": _MAX_MODEL_LEN}
    if system in _SETTINGS:
        own = [f"engine.{name}={value}" for name, value in engine.items()]
        # Its one decoder alone holds histories: whether a prefiller hosts some is not in question.
        arguments = ["decoders=1", "placement=conversation", f"port={PORT}", *own]
        arguments += _SETTINGS[system]
        with Launch(arguments, logs / f"{system}.log") as launch:
            report(f"starting {system}")
            launch.wait_until_serving(URL, 1, 1)
            yield CONVERSATION_HEADER
        return
    if system == BARE:
        engine["num_gpu_blocks_override"] *= 2
    options = Options(engines=2, engine=engine, port=PORT, logs=logs)
    with start(system, options, report) as peer:
        yield peer.session_header or CONVERSATION_HEADER


def report(found: dict[str, list[Level]], room_tokens: int, shape: Shape, console: Console) -> None:
    """Print the table."""
    table = Table(title=f"agents beyond what a decoder holds ({room_tokens:,} tokens)")
    table.add_column("system", no_wrap=True)
    columns = (
        "agents", "times its room", "output tokens/s", "of once", "found", "turn p50", "p95",
        "refused",
    )  # fmt: skip
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for system, levels in found.items():
        for level in levels:
            turns = level.latency_s
            table.add_row(
                system if level is levels[0] else "",
                str(level.agents),
                f"{level.agents * shape.mean_tokens / room_tokens:.1f}",
                f"{level.tokens_per_s:.1f}",
                f"{level.tokens_per_s / levels[0].tokens_per_s:.2f}"
                if levels[0].output_tokens
                else "",
                f"{level.found:.1%}" if level.repeated_tokens else "",
                f"{percentile(turns, 0.5):.2f} s" if turns else "",
                f"{percentile(turns, 0.95):.2f} s" if turns else "",
                str(sum(level.refused.values())),
            )
        table.add_section()
    console.print(table)


def draw(found: dict[str, list[Level]], path: Path) -> None:
    """Draw throughput, and what is found, against the number of agents."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    throughput, hits = figure.subplots(1, 2)
    for (system, levels), marker in zip(found.items(), "osD^Pv", strict=False):
        agents = [level.agents for level in levels]
        throughput.plot(agents, [one.tokens_per_s for one in levels], marker=marker, label=system)
        # Of those who made no later turn there is nothing to say.
        seen = [one for one in levels if one.repeated_tokens]
        hits.plot([one.agents for one in seen], [100 * one.found for one in seen], marker=marker)
    throughput.set_ylabel("output tokens a second")
    hits.set_ylabel("found of what is repeated, %")
    hits.set_ylim(0, 102)
    throughput.set_ylim(bottom=0)
    for axes in (throughput, hits):
        axes.set_xlabel("agents at work")
        axes.set_xticks(sorted({one.agents for levels in found.values() for one in levels}))
        axes.grid(alpha=0.3)
    figure.legend(loc="outside upper center", ncols=len(found), frameon=False)
    figure.savefig(path, dpi=130)


def _say(progress: Progress, task: TaskID, text: str) -> None:
    progress.update(task, description=text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--times", default="1,2,3,4", help="histories, in times a decoder's room")
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--blocks", type=int, default=96, help="of KV of each engine")
    parser.add_argument("--settle", type=float, default=20.0, help="seconds, of each number")
    parser.add_argument("--seconds", type=float, default=60.0, help="that are counted after that")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="folder for a picture and what was measured")
    options = parser.parse_args()
    console = new_console(least_width=110)
    logs = Path(tempfile.mkdtemp(prefix="conserve-overcommit-"))
    shape, room_tokens = Shape(), options.blocks * _BLOCK_TOKENS
    counts = [
        max(1, round(float(times) * room_tokens / shape.mean_tokens))
        for times in options.times.split(",")
    ]
    chosen = options.systems.split(",")
    if unknown := set(chosen) - set(SYSTEMS):
        parser.error(f"--systems: no {', '.join(sorted(unknown))}; there are {', '.join(SYSTEMS)}")
    found: dict[str, list[Level]] = {}
    with Progress(console=console) as progress:
        for name in chosen:
            task = progress.add_task(name, total=len(counts))
            say = partial(_say, progress, task)
            try:
                with serving(name, options.blocks, logs, say) as header:
                    say(name)
                    found[name] = asyncio.run(
                        measure(
                            counts, shape, options.settle, options.seconds, options.seed, header,
                            partial(progress.advance, task),
                        )
                    )  # fmt: skip
            except PeerUnavailable as error:
                console.print(f"{name}: {error}", style="yellow")
    report(found, room_tokens, shape, console)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        draw(found, options.out / "overcommit.png")
        told = {name: [asdict(level) for level in levels] for name, levels in found.items()}
        (options.out / "overcommit.json").write_text(json.dumps(told) + "\n")
        console.print(f"Picture and numbers are in {options.out}.")


if __name__ == "__main__":
    main()
