"""Clients that do their worst, within their limits: one kind of body over and over.

Its kinds are the largest, the deepest, the one with the most messages, and so on. Hardly any is
work for an engine's model: most are refused, by the router or by the engine. The clients' process
yields to all others (nice 19): on a real network it would have cores of its own.
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
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

import aiohttp
from PIL import Image

from conserve import budget
from conserve.apis import CHAT, COMPLETIONS, TOKENIZE
from conserve.settings import Settings
from experiments.agents import MODEL, clients

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
