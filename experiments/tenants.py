"""Measures whether a tenant can tell from time what another has sent, by times to first token.

In each round one tenant sends a prompt, and then, in random order: another tenant sends the same
prompt, the other tenant sends a new one, and the first one sends its own again, each
as a new conversation. The table has medians over rounds, and each against the unsent one of the
same round, with a bootstrap interval of 95 %. A tenant that could see another's cache would be as
quick as the first one is with its own prompt, which shows that a hit can be seen at all.
"""

import asyncio
import random
from collections.abc import Sequence
from itertools import groupby
from statistics import median

import aiohttp

from conserve.tenants import KeyFile, keyfile
from experiments.agents import ask, clients, end, words
from experiments.harness import Experiment, paired_ratio, ratio_cells, rounds

UNSENT, OTHERS, OWN = "one that nobody has sent", "another tenant's", "its own, again"
_DAY = "2026-01-01"


async def first_token_s(session: aiohttp.ClientSession, url: str, key: str, prompt: str) -> float:
    """Send a prompt as a new conversation, and end that; returns the time to its first token."""
    headers = {"Authorization": f"Bearer {key}"}
    answer = await ask(session, url, [{"role": "user", "content": prompt}], 1, headers)
    await end(session, url, answer.headers["x-conversation-id"], headers)
    return answer.ttft_s


async def measure(experiment: Experiment, url: str, keys: dict[str, str]) -> dict[str, list[float]]:
    """Return times to first token by whose prompt it was, a number a round."""
    options = experiment.options
    rng = random.Random(options.seed)
    times: dict[str, list[float]] = {UNSENT: [], OTHERS: [], OWN: []}
    order = rounds(times, options.rounds, options.seed, warm_up=1)
    grouped = [(number, list(ones)) for number, ones in groupby(order, lambda one: one[0])]
    async with clients(timeout_s=300) as session:
        for number, probes in experiment.track(grouped):
            sent, unsent = words(rng, options.words), words(rng, options.words)
            await first_token_s(session, url, keys["first"], sent)
            for _, name in probes:
                key = keys["first" if name == OWN else "second"]
                prompt = unsent if name == UNSENT else sent
                found_s = await first_token_s(session, url, key, prompt)
                if number >= 0:
                    times[name].append(found_s)
    return times


def main(arguments: Sequence[str] | None = None) -> None:
    experiment = Experiment("tenants", __doc__, rounds=30, seed=1)
    experiment.option("--words", 2000, "of a prompt, about a token each")
    experiment.parse(arguments)
    path = experiment.logs / "keys.json"
    content, keys = KeyFile.new(), {}
    for tenant in ("first", "second"):
        content, keys[tenant] = content.with_key(tenant, _DAY)
    keyfile.write(path, content)
    with experiment.serving(f"keys_file={path}") as url:
        times = asyncio.run(measure(experiment, url, keys))
    base = times[UNSENT]
    rows = [
        (name, f"{median(found) * 1000:.1f}", *ratio_cells(found, base))
        for name, found in times.items()
    ]
    title = "time to first token of a prompt, milliseconds"
    experiment.show(title, ("prompt", "median", "ratio", "95 %"), rows)
    ratios = {name: paired_ratio(found, base) for name, found in times.items()}
    experiment.save({"times_s": times, "ratios": ratios})


if __name__ == "__main__":
    main()
