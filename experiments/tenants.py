"""Whether a tenant can tell from time what another has sent: times to first token, side by side.

    python -m experiments.tenants [--rounds 30] [--json PATH]

In each round one tenant sends a prompt, and then, in random order: another tenant sends the same
prompt, the other tenant sends one that nobody has sent, and the first one sends its own again, each
as a new conversation. The table has medians over rounds, and each against the unsent one of the
same round, with a bootstrap interval of 95 %. A tenant that could see another's cache would be as
quick as the first one is with its own prompt, which shows that a hit can be seen at all.
"""

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import aiohttp
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from conserve.console import new_console
from conserve.launch import Launch
from conserve.tenants import KeyFile, keyfile
from experiments.warm import MODEL, median_interval

URL = "http://127.0.0.1:8000"
UNSENT, OTHERS, OWN = "one that nobody has sent", "another tenant's", "its own, again"
_DAY = "2026-01-01"
_WORDS = ("open", "close", "read", "write", "file", "class", "return", "import", "value", "index")


async def first_token_s(session: aiohttp.ClientSession, key: str, prompt: str) -> float:
    """Send a prompt as a new conversation, and end that; time to the answer's first byte."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 1,
        "temperature": 0,
        "stream": True,
    }
    headers = {"Authorization": f"Bearer {key}"}
    started_s = time.perf_counter()
    async with session.post(URL + "/v1/chat/completions", json=body, headers=headers) as response:
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {await response.text()}")
        await response.content.readany()
        first_s = time.perf_counter() - started_s
        await response.read()
        name = response.headers["x-conversation-id"]
    async with session.delete(f"{URL}/v1/conversations/{name}", headers=headers) as response:
        await response.read()
    return first_s


async def measure(
    keys: dict[str, str], rounds: int, words: int, seed: int, advance: Callable[[], None]
) -> dict[str, list[float]]:
    """Times to first token by whose prompt it was, a number a round."""
    rng = random.Random(seed)
    times: dict[str, list[float]] = {UNSENT: [], OTHERS: [], OWN: []}
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        for number in range(rounds + 1):
            sent, unsent = (" ".join(rng.choice(_WORDS) for _ in range(words)) for _ in range(2))
            await first_token_s(session, keys["first"], sent)
            probes = {
                UNSENT: ("second", unsent),
                OTHERS: ("second", sent),
                OWN: ("first", sent),
            }
            for name in rng.sample(list(probes), len(probes)):
                tenant, prompt = probes[name]
                found_s = await first_token_s(session, keys[tenant], prompt)
                if number:  # The first round warms up.
                    times[name].append(found_s)
            advance()
    return times


def ratio(times: list[float], base: list[float]) -> tuple[float, float, float]:
    """Median over rounds of one against another, and its 95 % interval."""
    return median_interval([one / other for one, other in zip(times, base, strict=True)])


def report(times: dict[str, list[float]], console: Console) -> None:
    """Print the table."""
    table = Table(title="time to first token of a prompt, milliseconds")
    table.add_column("prompt", no_wrap=True)
    for column in ("median", "ratio", "95 %"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, found in times.items():
        middle, low, high = ratio(found, times[UNSENT])
        interval = "" if name == UNSENT else f"{low:.2f}-{high:.2f}"
        table.add_row(name, f"{statistics.median(found) * 1000:.1f}", f"{middle:.2f}", interval)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--words", type=int, default=2000, help="of a prompt, about a token each")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console = new_console(least_width=110)
    folder = Path(tempfile.mkdtemp(prefix="conserve-tenants-"))
    content, keys = KeyFile.new(), {}
    for tenant in ("first", "second"):
        content, keys[tenant] = content.with_key(tenant, _DAY)
    keyfile.write(folder / "keys.json", content)
    arguments = ["decoders=1", f"keys_file={folder / 'keys.json'}"]
    with Launch(arguments, folder / "conserve.log") as launch:
        with console.status(f"starting ConServe (logs: {folder})"):
            launch.wait_until_serving(URL, 1, 1)
        with Progress(console=console) as progress:
            task = progress.add_task("rounds", total=options.rounds + 1)
            times = asyncio.run(
                measure(
                    keys,
                    options.rounds,
                    options.words,
                    options.seed,
                    lambda: progress.advance(task),
                )
            )
    report(times, console)
    if options.json:
        ratios = {name: ratio(found, times[UNSENT]) for name, found in times.items()}
        options.json.write_text(json.dumps({"times_s": times, "ratios": ratios}) + "\n")


if __name__ == "__main__":
    main()
