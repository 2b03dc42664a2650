"""Measures how long an engine's iterations take by the tokens that they prefill.

While one stream decodes, prompts of one size after the other are sent; the longest time between
two tokens of the stream meanwhile is that of the iteration with the prompt in it. The server is a
bare engine, idle, that takes the largest size in one step (vLLM's ``max_num_batched_tokens``).
"""

import asyncio
import contextlib
import random
import statistics
import time
from collections.abc import Iterable, Sequence
from itertools import pairwise

import httpx

from conserve_lab.selection import DEFAULT_VOCABULARY

SIZES = (32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
SLO_MULTIPLE = 5.0
_STREAM_TOKENS = 1000
_PROMPT_TOKENS = 16
_TIMEOUT_S = 120.0
_LOOK_S = 0.01


async def iterations(
    url: str, model: str, sizes: Sequence[int] = SIZES, repeats: int = 7, unloaded_s: float = 2.0
) -> tuple[list[tuple[int, float]], float]:
    """Measure; takes some ten seconds and more.

    Args:
        repeats: number of prompts of each size; the median counts.
        unloaded_s: how long only the stream runs, for the step without load.

    Returns:
        Points (tokens prefilled in an iteration, its median seconds), and the median seconds of a
        decode step without load; both are what `largest_chunk` takes.
    """
    draw = random.Random(0)
    first, last = (int(end) for end in str(DEFAULT_VOCABULARY).split(":"))
    arrivals: list[float] = []

    def prompt(tokens: int) -> list[int]:
        return [draw.randrange(first, last) for _ in range(tokens)]

    async def decode() -> None:
        while True:
            body = {
                "model": model,
                "prompt": prompt(_PROMPT_TOKENS),
                "max_tokens": _STREAM_TOKENS,
                "ignore_eos": True,
                "stream": True,
            }
            async with client.stream("POST", "/v1/completions", json=body) as reply:
                reply.raise_for_status()
                async for line in reply.aiter_lines():
                    # Appended one by one: others read the list while it grows.
                    if line.startswith("data: {"):
                        arrivals.append(time.perf_counter())  # noqa: PERF401

    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S) as client:
        stream = asyncio.create_task(decode())
        try:
            await asyncio.sleep(unloaded_s)
            await _until(3, arrivals, stream)
            if stream.done():
                stream.result()
            step_s = statistics.median(later - earlier for earlier, later in pairwise(arrivals))
            points = []
            for size in sizes:
                longest = []
                for _ in range(repeats):
                    since = len(arrivals) - 1
                    body = {"model": model, "prompt": prompt(size), "max_tokens": 1}
                    (await client.post("/v1/completions", json=body)).raise_for_status()
                    await asyncio.sleep(5 * step_s)
                    await _until(since + 2, arrivals, stream)
                    gaps = [later - earlier for earlier, later in pairwise(arrivals[since:])]
                    longest.append(max(gaps))
                    if stream.done():
                        stream.result()
                points.append((size, statistics.median(longest)))
        finally:
            stream.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await stream
    return points, step_s


async def _until(many: int, arrivals: Sequence[float], stream: asyncio.Task[None]) -> None:
    """Return when ``many`` tokens have arrived, or the stream has ended."""
    while len(arrivals) < many and not stream.done():  # noqa: ASYNC110  # A list tells of nothing.
        await asyncio.sleep(_LOOK_S)


def largest_chunk(
    points: Iterable[tuple[int, float]], decode_step_s: float, multiple: float = SLO_MULTIPLE
) -> int:
    """Return a collocated engine's chunk by the paper's rule, from measured iterations.

    It counts if all smaller ones stay within the bound too: one lucky measurement does not decide.

    Args:
        points: tokens of a chunk, and seconds of an iteration that computes it.
        multiple: how many decode steps an iteration may take.

    Raises ValueError: no points, or not even the smallest chunk stays within the bound.
    """
    if decode_step_s <= 0:
        raise ValueError(f"decode_step_s: {decode_step_s:g} is not positive")
    largest = 0
    for tokens, step_s in sorted(points):
        if step_s > multiple * decode_step_s:
            break
        largest = tokens
    if not largest:
        raise ValueError(
            f"no chunk stays within {multiple:g} x {decode_step_s:g} s; measure smaller ones"
        )
    return largest
