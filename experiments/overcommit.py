"""Agents whose histories are several times what engines can hold: throughput, and what is found.

One system after the other is started, each with the same engines and room for the same KV, in a
random order in each round. As many agents work at a time that their histories take that room once,
twice and so on: each sends a long first prompt, then turns that append a little, with gaps between
as tools take, and when it has made all of its turns it begins anew, without a word about the old
one. For each number of agents there are output tokens a second, and the share of what a later turn
repeats that no engine had to compute (by ``usage``). A turn that is refused counts, and is sent
again a second later.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

from benchmarks.peers import Options, PeerUnavailable, start
from benchmarks.peers.plan import CONVERSATION_HEADER
from conserve.settings import EMBEDDED_MODEL, load
from experiments.agents import MODEL, Agent, Shape, clients
from experiments.harness import Experiment, figure, numbers, percentile, rounds

PORT = 8000
CONSERVE, PINNED, BARE = "conserve", "pausing-off", "vllm"
SYSTEMS = (CONSERVE, PINNED, "ray_serve_llm", "vllm_router", "vllm_lmcache", BARE)
_SETTINGS = {CONSERVE: (), PINNED: ("pausing=off",)}
_BLOCK_TOKENS = 128
# vLLM refuses a longer one than its KV space can hold.
_MAX_MODEL_LEN = 4096
_RETRY_S = 1.0
SHAPE = Shape(first_words=1500, later_words=100, output_tokens=24, turns=8)
_GAP_S = 1.0
# How long a history is, halfway.
MEAN_TOKENS = SHAPE.first_words + (SHAPE.later_words + SHAPE.output_tokens) * SHAPE.turns // 2


@dataclass(slots=True)
class Level:
    """Figures of a system with a number of agents.

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
        return self.output_tokens / self.seconds

    @property
    def found(self) -> float:
        """The share of what was repeated that no engine had to compute."""
        return self.found_tokens / self.repeated_tokens if self.repeated_tokens else 0.0

    def pooled(self, other: "Level") -> "Level":
        """Return this and another round's together."""
        refused = Counter(self.refused) + Counter(other.refused)
        return Level(
            self.agents,
            self.seconds + other.seconds,
            self.output_tokens + other.output_tokens,
            self.repeated_tokens + other.repeated_tokens,
            self.found_tokens + other.found_tokens,
            dict(refused),
            self.latency_s + other.latency_s,
        )

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


class Watch:
    """Has agents work, and counts what they do for a while.

    Args:
        shape: of their conversations.
        gap_s: mean time between an agent's turns.
        model: that they ask for.
    """

    def __init__(self, shape: Shape = SHAPE, gap_s: float = _GAP_S, model: str = MODEL) -> None:
        self._shape = shape
        self._model = model
        self._gap_s = gap_s
        self._level: Level | None = None

    async def measure(
        self, url: str, header: str, count: int, settle_s: float, seconds: float, seed: int
    ) -> Level:
        """Have ``count`` agents work; the first ``settle_s`` are not counted."""
        async with clients() as session:
            agents = [
                Agent(session, url, f"{seed}-{count}-{n}", shape=self._shape, header=header,
                      on_refused=self._refused)
                for n in range(count)
            ]  # fmt: skip
            self._level, level = None, Level(count, seconds)
            tasks = [asyncio.ensure_future(self._work(agent)) for agent in agents]
            _, working = await asyncio.wait(
                tasks, timeout=settle_s, return_when=asyncio.FIRST_EXCEPTION
            )
            self._level = level
            if len(working) == len(tasks):
                _, working = await asyncio.wait(tasks, timeout=seconds)
            for task in working:
                task.cancel()
            # An agent works for ever: one that does not, has failed.
            for failed in set(tasks) - working:
                failed.result()
            await asyncio.gather(*working, return_exceptions=True)
        return level

    async def _work(self, agent: Agent) -> None:
        await asyncio.sleep(agent.rng.uniform(0, self._gap_s))
        while True:
            before, began_s = agent.held_tokens, time.perf_counter()
            answer = await agent.turn(stream=False, stream_options=None, model=self._model)
            if self._level is not None:
                took_s = time.perf_counter() - began_s
                self._level.add(answer.usage, before, took_s)
            await asyncio.sleep(agent.rng.expovariate(1 / self._gap_s))

    async def _refused(self, status: int) -> None:
        if self._level is not None:
            self._level.refused[status] = self._level.refused.get(status, 0) + 1
        await asyncio.sleep(_RETRY_S)


@contextlib.contextmanager
def serving(experiment: Experiment, system: str) -> Iterator[tuple[str, str]]:
    """Have a system up for the time of a ``with`` block.

    A bare engine has the blocks of all engines of the others.

    Yields:
        Its URL, and the header by which it tells conversations apart.

    Raises:
        PeerUnavailable: it cannot run here.
    """
    chosen = experiment.options
    engine = {"num_gpu_blocks_override": chosen.blocks, "max_model_len": _MAX_MODEL_LEN}
    if system in _SETTINGS:
        own = [f"engine.{name}={value}" for name, value in engine.items()]
        own.append(f"lmcache.size_gb={chosen.host_gib}")
        # Its one decoder alone holds histories: whether a prefiller hosts some is not in question.
        settings = ("placement=conversation", f"model={chosen.model}", *own, *_SETTINGS[system])
        prefillers = chosen.engines - 1
        with experiment.serving(*settings, prefillers=prefillers, port=PORT, name=system) as url:
            yield url, CONVERSATION_HEADER
        return
    if system == BARE:
        engine["num_gpu_blocks_override"] *= chosen.engines
    options = Options(
        engines=chosen.engines,
        model=chosen.model,
        engine=engine,
        port=PORT,
        host_gib=chosen.host_gib,
        logs=experiment.logs,
    )
    with start(system, options, experiment.console.print) as peer:
        yield f"http://127.0.0.1:{PORT}", peer.session_header or CONVERSATION_HEADER


def pool(rounds: Sequence[Sequence[Level]]) -> list[Level]:
    """Return a system's levels over all of its rounds."""
    return [reduce(Level.pooled, levels) for levels in zip(*rounds, strict=True)]


def report(found: dict[str, list[Level]], room_tokens: int, experiment: Experiment) -> None:
    rows: list[list[str]] = []
    for system, levels in found.items():
        for level in levels:
            turns, first = level.latency_s, levels[0]
            of_once = (
                f"{level.tokens_per_s / first.tokens_per_s:.2f}" if first.output_tokens else ""
            )
            rows.append(
                [
                    system if level is first else "",
                    str(level.agents),
                    f"{level.agents * MEAN_TOKENS / room_tokens:.1f}",
                    f"{level.tokens_per_s:.1f}",
                    of_once,
                    f"{level.found:.1%}" if level.repeated_tokens else "",
                    *(f"{percentile(turns, q):.2f} s" if turns else "" for q in (0.5, 0.95)),
                    str(sum(level.refused.values())),
                ]
            )
        rows.append([])
    columns = ["system", "agents", "times its room", "output tokens/s", "of once", "found"]
    columns += ["turn p50", "p95", "refused"]
    title = f"agents beyond what a decoder holds ({room_tokens:,} tokens)"
    experiment.show(title, columns, rows)


def draw(found: dict[str, list[Level]], path: Path) -> None:
    """Draw throughput, and what is found, against the number of agents."""
    picture = figure(9, 3.6)
    throughput, hits = picture.subplots(1, 2)
    for (system, levels), marker in zip(found.items(), "osD^Pv", strict=False):
        agents = [level.agents for level in levels]
        throughput.plot(agents, [one.tokens_per_s for one in levels], marker=marker, label=system)
        # Without later turns there is no share.
        seen = [one for one in levels if one.repeated_tokens]
        hits.plot([one.agents for one in seen], [100 * one.found for one in seen], marker=marker)
    throughput.set_ylabel("output tokens a second")
    hits.set_ylabel("found of what is repeated, %")
    hits.set_ylim(0, 102)
    throughput.set_ylim(bottom=0)
    for axes in (throughput, hits):
        axes.set_xlabel("active agents")
        axes.set_xticks(sorted({one.agents for levels in found.values() for one in levels}))
        axes.grid(alpha=0.3)
    picture.legend(loc="outside upper center", ncols=len(found), frameon=False)
    picture.savefig(path, dpi=130)


def main(arguments: Sequence[str] | None = None) -> None:
    experiment = Experiment("overcommit", __doc__, width=110, seed=1, rounds=1)
    experiment.option("--times", "1,2,3,4", "histories, in times a decoder's room",
                      type=numbers, metavar="N,...")  # fmt: skip
    experiment.option("--systems", ",".join(SYSTEMS))
    experiment.option("--blocks", 96, "of KV of each engine")
    experiment.option("--engines", 2, "1: one that does everything; 2: ConServe has a prefiller")
    experiment.option("--host-gib", 2.0, "of host memory for KV, of systems that have some")
    experiment.option("--model", EMBEDDED_MODEL)
    experiment.option("--settle", 20.0, "seconds, of each number")
    experiment.option("--seconds", 60.0, "that are counted after that")
    options = experiment.parse(arguments)
    room_tokens = options.blocks * _BLOCK_TOKENS
    counts = [max(1, round(times * room_tokens / MEAN_TOKENS)) for times in options.times]
    chosen = options.systems.split(",")
    if unknown := set(chosen) - set(SYSTEMS):
        known = ", ".join(SYSTEMS)
        experiment.parser.error(f"--systems: no {', '.join(sorted(unknown))}; there are {known}")
    model = load({"model": options.model}).model_id
    by_round: dict[str, list[list[Level]]] = {}
    for number, name in rounds(chosen, options.rounds, options.seed):
        try:
            with serving(experiment, name) as (url, header):
                by_round.setdefault(name, []).append(
                    [
                        asyncio.run(
                            Watch(model=model).measure(
                                url, header, count, options.settle, options.seconds,
                                options.seed + number,
                            )
                        )
                        for count in experiment.track(counts, name)
                    ]
                )  # fmt: skip
        except PeerUnavailable as error:
            experiment.console.print(f"{name}: {error}", style="yellow")
    found = {name: pool(by_round[name]) for name in chosen if name in by_round}
    report(found, room_tokens, experiment)
    experiment.save(by_round)
    if path := experiment.file("png"):
        draw(found, path)
        experiment.console.print(f"Picture and numbers are in {path.parent}.")


if __name__ == "__main__":
    main()
