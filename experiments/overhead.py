"""Measures what ConServe costs: warm turns through it, against the bare engine's own server.

The same engine settings behind vLLM's OpenAI server, behind ConServe (one engine that does
everything), behind vLLM's router and behind Ray Serve LLM with direct streaming, the faster of its
two ingresses (`conserve_lab.peers` has their settings). All are up at the same time, with an engine
each, and measured in rounds. Ray Serve LLM sends several tokens at a time. With ``--beside`` there
is one more ConServe, with other settings.

A system's turns are those of agents, `ROUND_TURNS` of them in a round or as many as there are
clients. The first turn of a conversation is made and not measured. TBT is the time between a
stream's parts. A ratio is the median over rounds of one system's median within a round against
another's in the same round, with a bootstrap interval of 95 %.
"""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import product
from statistics import median
from typing import NamedTuple

from conserve_lab.peers import Options
from conserve_lab.peers.apart import start_apart
from conserve_lab.peers.plan import free_port
from experiments.agents import USUAL, Agent, Shape, clients
from experiments.harness import Experiment, paired_ratio, percentile, ratio_cells, rounds

BARE, CONSERVE = "vllm", "conserve"
PEERS = "vllm_router,ray_serve_llm"
_BESIDE_PORT = 8193
# Turns of one system in one round, over all its clients.
ROUND_TURNS = 4
_WARM_UP_ROUNDS = 2


@contextlib.contextmanager
def hogs(count: int) -> Iterator[None]:
    """Keep ``count`` processes computing for the time of a ``with`` block.

    Each takes as much of a core as the operating system gives to one more process.
    """
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


class Load(NamedTuple):
    """How many turns at a time, beside how many processes that want cores."""

    clients: int
    hogs: int = 0

    def __str__(self) -> str:
        beside = f", {self.hogs} CPU hog{'s' * (self.hogs != 1)}" if self.hogs else ""
        return f"{self.clients} client{'s' * (self.clients != 1)}{beside}"


@dataclass
class WarmTurns:
    """Warm turns of one system under one load; times in seconds."""

    latency_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    tbt_s: list[float] = field(default_factory=list)
    round_median_s: list[float] = field(default_factory=list)
    round_ttft_s: list[float] = field(default_factory=list)

    async def take(self, agent: Agent) -> None:
        """Take a warm turn as this agent, and count it."""
        answer = await agent.warm_turn()
        self.latency_s.append(answer.ended_s - answer.sent_s)
        self.ttft_s.append(answer.ttft_s)
        self.tbt_s += answer.gaps_s

    def add(self, turns: "WarmTurns") -> None:
        self.latency_s += turns.latency_s
        self.ttft_s += turns.ttft_s
        self.tbt_s += turns.tbt_s
        self.round_median_s.append(median(turns.latency_s))
        self.round_ttft_s.append(median(turns.ttft_s))


# By load, and by system.
Results = dict[Load, dict[str, WarmTurns]]


def compare(experiment: Experiment, systems: Mapping[str, str]) -> None:
    """Measure systems under each load, and print and save ratios to the bare server.

    Args:
        systems: their URLs, by their names.
    """
    options = experiment.options
    results: Results = {}
    for load in [Load(count, hog) for hog, count in product(options.hogs, options.clients)]:
        with hogs(load.hogs):
            results[load] = asyncio.run(measure(experiment, systems, load))
    report(results, experiment)
    experiment.save(
        {
            "options": {key: str(value) for key, value in vars(options).items()},
            "ratios": {
                str(load): {
                    name: paired_ratio(one.round_median_s, found[BARE].round_median_s)
                    for name, one in found.items()
                }
                for load, found in results.items()
            },
            "samples": {str(load): found for load, found in results.items()},
        }
    )


async def measure(
    experiment: Experiment, systems: Mapping[str, str], load: Load
) -> dict[str, WarmTurns]:
    """Measure the systems in turn under one load, round after round."""
    options = experiment.options
    shape = Shape(first_words=options.first_words, output_tokens=options.output_tokens)
    results = {name: WarmTurns() for name in systems}
    async with clients(timeout_s=120) as session:
        seeds = [f"{options.seed}-{load.clients}-{load.hogs}-{n}" for n in range(load.clients)]
        agents = {
            name: [Agent(session, url, seed, shape=shape) for seed in seeds]
            for name, url in systems.items()
        }
        order = rounds(results, options.rounds, options.seed, _WARM_UP_ROUNDS)
        for number, name in experiment.track(order, str(load)):
            here = WarmTurns()
            while len(here.latency_s) < ROUND_TURNS:
                await asyncio.gather(*(agent.prepare() for agent in agents[name]))
                await asyncio.gather(*(here.take(agent) for agent in agents[name]))
            if number >= 0:
                results[name].add(here)
    return results


def report(results: Results, experiment: Experiment) -> None:
    """Print a table for each load, with ratios to the bare server."""
    columns = ["system", "latency ratio", "95 %", "TTFT ratio", "95 %"]
    columns += ["latency p50", "p95", "TTFT p50", "p95", "TBT p50", "p95"]
    for load, systems in results.items():
        to = systems[BARE]
        rows = []
        for name, found in systems.items():
            row = [name, *ratio_cells(found.round_median_s, to.round_median_s, 3)]
            row += ratio_cells(found.round_ttft_s, to.round_ttft_s, 3)
            for values in (found.latency_s, found.ttft_s, found.tbt_s):
                row += [f"{percentile(values, q) * 1000:.1f}" for q in (0.5, 0.95)]
            rows.append(row)
        experiment.show(f"{load}, warm turns, milliseconds", columns, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    experiment = Experiment("overhead", __doc__, width=130, rounds=40, seed=1)
    experiment.option("--clients", [1, 8])
    experiment.option("--hogs", [0], "processes beside it that want cores")
    about = "length of a conversation's first prompt, which later turns go on from"
    experiment.option("--first-words", USUAL.first_words, about)
    experiment.option("--output-tokens", USUAL.output_tokens, "length of each answer")
    experiment.option("--peers", PEERS, "beside the bare server and ConServe; '': none")
    add = experiment.parser.add_argument
    add("--beside", metavar="NAME=VALUE", nargs="+", help="settings of one more ConServe")
    add("--client-core", type=int, help="pin this process to a core")
    options = experiment.parse(arguments)
    if options.client_core is not None:
        os.sched_setaffinity(0, {options.client_core})
    peers = {}
    with ExitStack() as stack:
        for name in (BARE, *filter(None, options.peers.split(","))):
            one = Options(engines=1, port=free_port(), logs=experiment.logs)
            started = start_apart(name, one, experiment.console.print)
            peers[name] = stack.enter_context(started).peer.url
        alone = experiment.serving("lmcache.port=0", prefillers=0)
        systems = {BARE: peers.pop(BARE), CONSERVE: stack.enter_context(alone), **peers}
        if options.beside:
            name = f"{CONSERVE}, {' '.join(options.beside)}"
            beside = experiment.serving(
                "lmcache.port=0", *options.beside, prefillers=0, port=_BESIDE_PORT, name=name
            )
            systems[name] = stack.enter_context(beside)
        compare(experiment, systems)


if __name__ == "__main__":
    main()
