"""Measures what clients that do their worst, within their limits, cost the others.

Agents stream answers, turn after turn, from one ConServe. Meanwhile unkind clients, in a process of
their own, send one kind of body over and over, on several connections: the largest, the deepest,
the one with the most messages, and so on. Hardly any is work for an engine's model: most are
refused, by the router or by the engine. Rounds go through all kinds and "none" in random order; for
each kind the table has the median over rounds of its round's p95 less the p95 of "none" in the same
round, with a bootstrap interval of 95 %.

The unkind clients' process yields to all others (nice 19): on a real network it would have cores of
its own.
"""

import asyncio
import base64
import contextlib
import io
import json
import math
import multiprocessing
import os
import queue
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import aiohttp
from PIL import Image

from conserve import budget
from conserve.apis import CHAT, COMPLETIONS, TOKENIZE
from conserve.settings import Settings
from experiments.agents import MODEL, Agent, clients
from experiments.harness import Experiment, median_interval, percentile, rounds
from experiments.warm import WarmTurns

NONE = "none"
VARYING_BYTES = 8
# Room for the rest of a body beside what fills it.
_SLACK_BYTES = 1024


class Unkind(NamedTuple):
    """One kind of request: a path, and a body or None.

    Attributes:
        varies: where `VARYING_BYTES` of base64 differ from one request to the next.
    """

    path: str
    body: bytes | None
    varies: Sequence[int] = ()


def chat_of(**fields: Any) -> Unkind:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    return Unkind(CHAT, json.dumps(body | fields).encode())


def _completion(prompt: Any) -> Unkind:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
    return Unkind(COMPLETIONS, json.dumps(body).encode())


def schema_of(**rule: Any) -> Unkind:
    """Return a request for an object by a schema that no other request has."""
    own = "x" * VARYING_BYTES
    schema = {"name": "own", "schema": {"type": "object", "properties": {own: rule}}}
    asked = chat_of(response_format={"type": "json_schema", "json_schema": schema})
    return asked._replace(varies=[asked.body.index(own.encode())])  # type: ignore[union-attr]


def _nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth - 1):
        value = [value]
    return value


def _picture(most_bytes: int) -> str:
    """Return an image of noise, as a URL; its bytes come to about as many."""
    side = math.isqrt(most_bytes // 3) - 1
    file = io.BytesIO()
    noise = random.Random(0).randbytes(3 * side * side)
    Image.frombytes("RGB", (side, side), noise).save(file, "PNG", compress_level=0)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def kinds(settings: Settings) -> dict[str, Unkind]:
    """Return the requests, by what they are made of."""
    room = settings.max_body_bytes - _SLACK_BYTES
    picture = {"type": "image_url", "image_url": {"url": _picture(settings.media.bytes)}}
    deep, flat = budget.DEEPEST - 3, budget.MOST_TOKENIZE_BYTES - _SLACK_BYTES
    messages = [{"role": "user", "content": "a few words of it"}] * budget.MOST_ITEMS
    nested = [_nested(deep)] * (budget.MOST_CONTAINERS // deep - 1)
    return {
        "longest text": chat_of(messages=[{"role": "user", "content": "a " * (room // 2)}]),
        "most arrays, unbounded": Unkind(CHAT, b'{"messages":[' + b"[]," * (room // 3) + b"[]]}"),
        "most values": chat_of(tools=[[0] * 127] * (budget.MOST_VALUES // 128 - 1)),
        # The engine refuses the temperature.
        "deepest": chat_of(metadata=nested, temperature=-1),
        "most messages": chat_of(messages=messages),
        "most token ids": _completion([1] * budget.MOST_TOKEN_IDS),
        "most prompts": _completion(["a b " * 10_000] * budget.MOST_CHOICES),
        "slowest schema": schema_of(type="string", pattern="^[a-z]{1,9999}$"),
        "a new schema each": schema_of(enum=[f"value-{n}" for n in range(1000)]),
        "flattest text": Unkind(TOKENIZE, json.dumps({"prompt": " " * flat}).encode()),
        # The engine's model reads text only.
        "largest image": chat_of(messages=[{"role": "user", "content": [picture]}]),
        "most listed": Unkind("/v1/conversations?limit=10000", None),
    }


def varied(unkind: Unkind, body: bytes) -> bytes:
    """Return the body of the next request of a kind."""
    if not unkind.varies:
        return body
    own = bytearray(body)
    for at in unkind.varies:
        own[at : at + VARYING_BYTES] = base64.b64encode(os.urandom(VARYING_BYTES * 3 // 4))
    return bytes(own)


def _send_for_ever(url: str, unkind: Unkind, connections: int, counts: Any) -> None:
    """Be the unkind clients; ``counts`` gets a status for each answer, and never blocks."""
    os.nice(19)

    async def one(session: aiohttp.ClientSession) -> None:
        headers = {"Content-Type": "application/json"}
        method = "GET" if unkind.body is None else "POST"
        while True:
            try:
                body = None if unkind.body is None else io.BytesIO(varied(unkind, unkind.body))
                async with session.request(
                    method, url + unkind.path, data=body, headers=headers
                ) as response:
                    await response.read()
                    counts.put(response.status)
            except aiohttp.ClientError as error:
                # The router may refuse a body before it has read it, and close.
                counts.put(type(error).__name__)

    async def all_of_them() -> None:
        async with clients(timeout_s=120) as session:
            await asyncio.gather(*(one(session) for _ in range(connections)))

    asyncio.run(all_of_them())


@contextlib.asynccontextmanager
async def sending(
    url: str, unkind: Unkind, connections: int, answers: Counter[str]
) -> AsyncIterator[None]:
    """Have unkind clients send for the time of an ``async with`` block, from their first answer on.

    Args:
        answers: gets what each is answered.
    """
    spawn = multiprocessing.get_context("spawn")
    counts = spawn.Queue()
    arguments = (url, unkind, connections, counts)
    process = spawn.Process(target=_send_for_ever, args=arguments, daemon=True)
    process.start()
    try:
        answers[str(await asyncio.to_thread(_first_answer, process, counts))] += 1
        yield
    finally:
        process.kill()
        process.join()
    while not counts.empty():
        answers[str(counts.get())] += 1


def _first_answer(process: Any, counts: Any) -> Any:
    while process.is_alive():
        try:
            return counts.get(timeout=1)
        except queue.Empty:
            continue
    raise RuntimeError("the unkind clients' process has ended; see its error above")


@dataclass
class Seen:
    """The others' p95 of time between tokens beside one kind of client, a number a round."""

    p95_s: list[float] = field(default_factory=list)
    answers: Counter[str] = field(default_factory=Counter)

    def more_s(self, calm: "Seen") -> tuple[float, float, float]:
        """Return the median over rounds of what this kind adds, and its 95 % interval."""
        more_s = [own - other for own, other in zip(self.p95_s, calm.p95_s, strict=True)]
        return median_interval(more_s)


async def _p95_s(agents: Sequence[Agent], seconds: float) -> float:
    """Return the p95 of the time between tokens while agents take turns for so long."""
    samples = WarmTurns()
    ends_s = time.monotonic() + seconds

    async def turns(agent: Agent) -> None:
        while time.monotonic() < ends_s:
            await samples.take(agent)

    await asyncio.gather(*(turns(agent) for agent in agents))
    return percentile(samples.tbt_s, 0.95)


async def measure(
    experiment: Experiment, url: str, all_kinds: dict[str, Unkind]
) -> dict[str, Seen]:
    """Go through the kinds, round after round."""
    options = experiment.options
    seen = {name: Seen() for name in (NONE, *all_kinds)}
    async with clients(timeout_s=300) as session:
        seeds = [f"kind-{options.seed}-{n}" for n in range(options.agents)]
        agents = [Agent(session, url, seed) for seed in seeds]
        await _p95_s(agents, options.seconds)
        for _, name in experiment.track(rounds(seen, options.rounds, options.seed)):
            found = seen[name]
            if name == NONE:
                found.p95_s.append(await _p95_s(agents, options.seconds))
                continue
            async with sending(url, all_kinds[name], options.connections, found.answers):
                found.p95_s.append(await _p95_s(agents, options.seconds))
    return seen


def report(seen: dict[str, Seen], experiment: Experiment) -> None:
    rows = []
    for name, one in seen.items():
        more, low, high = (1000 * value for value in one.more_s(seen[NONE]))
        change = ("", "") if name == NONE else (f"{more:+.1f}", f"{low:+.1f} to {high:+.1f}")
        answers = ", ".join(f"{count} of {what}" for what, count in one.answers.most_common(3))
        rows.append((name, f"{median(one.p95_s) * 1000:.1f}", *change, answers))
    columns = ("unkind clients send", "p95", "more than with none", "95 %", "answers")
    experiment.show("others' time between tokens, p95, milliseconds", columns, rows, names=0)


def main(arguments: Sequence[str] | None = None) -> None:
    experiment = Experiment("unkind", __doc__, width=110, rounds=10, seed=1)
    experiment.option("--seconds", 4.0, "of each kind in each round")
    experiment.option("--agents", 2)
    experiment.option("--connections", 2, "of unkind clients")
    all_kinds = kinds(Settings())
    experiment.option("--kinds", list(all_kinds), "only these", choices=all_kinds, metavar="KIND")
    options = experiment.parse(arguments)
    chosen = {name: all_kinds[name] for name in options.kinds}
    with experiment.serving() as url:
        seen = asyncio.run(measure(experiment, url, chosen))
    report(seen, experiment)
    experiment.save(
        {
            name: {"p95_s": one.p95_s, "answers": one.answers, "more_s": one.more_s(seen[NONE])}
            for name, one in seen.items()
        }
    )


if __name__ == "__main__":
    main()
