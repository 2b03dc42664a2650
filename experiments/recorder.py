"""Measure what `conserve record` costs a turn: two applications do the same, one is recorded.

Both are up all the time, and turns alternate in random order. Halfway the other one is recorded, so
that what sets the two apart by itself cancels: the ratio is the root of the two halves' product.
"""

import asyncio
import math
import random
import statistics
import subprocess
import sys
import time

import psutil

from experiments.agents import MODEL, ask, clients, end, words  # noqa: F401
from experiments.harness import Experiment


def cpu_s(root: int) -> float:
    total = 0.0
    for one in [psutil.Process(root), *psutil.Process(root).children(recursive=True)]:
        try:
            times = one.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
    return total


async def half(urls, options, seed):
    """TTFT and whole times of later turns, by application, in pairs."""
    rng = random.Random(seed)
    found = {url: ([], []) for url in urls}
    async with clients() as session:
        for number in range(options.conversations):
            system = words(rng, options.first)
            said = {url: [{"role": "user", "content": system}] for url in urls}
            for turn in range(options.turns + 1):
                text = words(rng, 40)
                order = list(urls)
                rng.shuffle(order)
                for url in order:
                    if turn:
                        said[url].append({"role": "user", "content": text})
                    headers = {"X-Conversation-Id": f"c{seed}-{number}"}
                    answer = await ask(session, url, said[url], 8, headers)
                    said[url].append({"role": "assistant", "content": answer.text})
                    if turn:
                        found[url][0].append(answer.ttft_s)
                        found[url][1].append(answer.ended_s - answer.sent_s)
            for url in urls:
                await end(session, url, f"c{seed}-{number}")
    return found


def ratio(recorded, alone):
    logs = [math.log(a / b) for a, b in zip(recorded, alone, strict=True)]
    return statistics.median(logs), statistics.quantiles(logs, n=4)


def main() -> None:
    experiment = Experiment("recorder", __doc__, seed=1)
    experiment.option("--conversations", 12)
    experiment.option("--turns", 20)
    experiment.option("--first", 2500, "words of a first prompt")
    options = experiment.parse()
    with experiment.serving("lmcache.port=0", port=8000, name="a", prefillers=0) as a, experiment.serving(
        "lmcache.port=0", port=8001, name="b", prefillers=0
    ) as b:
        asyncio.run(half([a, b], options_with(options, 1), 0))
        logs = []
        for number, (recorded, alone) in enumerate([(a, b), (b, a), (a, b), (b, a)]):
            recorder = subprocess.Popen(
                [sys.executable, "-m", "conserve_cli.main", "record", str(experiment.logs / f"{number}.jsonl"), recorded],
                stdout=subprocess.DEVNULL,
            )
            time.sleep(3)
            found = asyncio.run(half([a, b], options, options.seed + number))
            recorder.send_signal(2)
            recorder.wait()
            lines = sum(1 for _ in open(experiment.logs / f"{number}.jsonl"))
            row = []
            for kind in (0, 1):
                row.append([math.log(x / y) for x, y in zip(found[recorded][kind], found[alone][kind], strict=True)])
            logs.append(row)
            print(number, lines, [f"{math.exp(statistics.median(one)):.4f}" for one in row],
                  [f"{statistics.median(found[u][0])*1e3:.1f}" for u in (recorded, alone)], flush=True)
            time.sleep(33)
    for kind, name in enumerate(("TTFT", "whole turn")):
        def centre(draw):
            return statistics.mean(statistics.median(draw(row[kind])) for row in logs)
        rng = random.Random(0)
        point = centre(lambda it: it)
        draws = sorted(centre(lambda it: rng.choices(it, k=len(it))) for _ in range(1000))
        print(name, f"{math.exp(point):.4f}", f"95 %: {math.exp(draws[25]):.4f} to {math.exp(draws[975]):.4f}", flush=True)


def options_with(options, conversations):
    import copy

    it = copy.copy(options)
    it.conversations = conversations
    return it


if __name__ == "__main__":
    main()
