"""Tries at an engine's start what handing a prompt over costs it.

A prompt that is handed over is stored, looked up and loaded, and its end is computed again. An
engine tries that alone: it computes a prompt as a prefiller would, forgets it, and takes it back.

Engines start side by side and take the machine from each other, so the same prompt may take twice
as long a second later. What a prompt's iterations took is therefore left out, on both sides, and
loads are tried several times, of which the fastest counts.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from deployments.engine.load import LoadMeter

# None is whole chunks of LMCache's.
TRIED_TOKENS = (300, 1_500)
_LOADS = 3
_FORGETTING_TRIES = 20
_FORGETTING_PAUSE_S = 0.01


async def try_handoff(
    client: Any,
    meter: LoadMeter,
    compute: Callable[[], Awaitable[None]],
    store: Callable[[], Awaitable[None]],
    load: Callable[[], Awaitable[None]],
    tokens: int,
    clock: Callable[[], float] = time.monotonic,
) -> float | None:
    """Return the seconds by which a prompt takes longer when it is handed over.

    Args:
        client: the engine's ``AsyncLLM``, which forgets its prefix cache on the way.
        compute: has it compute a prompt of ``tokens`` tokens.
        store: has it compute another one, and store that.
        load: asks for the latter again.

    Returns:
        None: no load has found anything.
    """
    here_s = await _beside_steps_s(meter, compute, clock)
    away_s = await _beside_steps_s(meter, store, clock)
    loads_s = []
    for _ in range(_LOADS):
        if not await forget(client):
            continue
        before, began_s = meter.prompt_tokens, clock()
        await load()
        # Keys are found some milliseconds after a prompt is stored: until then it is computed.
        if meter.prompt_tokens - before < tokens:
            loads_s.append(clock() - began_s)
    if not loads_s:
        return None
    return max(0.0, away_s - here_s) + min(loads_s)


async def _beside_steps_s(
    meter: LoadMeter, ask: Callable[[], Awaitable[None]], clock: Callable[[], float]
) -> float:
    """Seconds that a request takes beside its iterations."""
    before_s, began_s = meter.steps_s, clock()
    await ask()
    return clock() - began_s - (meter.steps_s - before_s)


async def forget(client: Any) -> bool:
    """Have an ``AsyncLLM`` forget its prefix cache; whether it has.

    It refuses while a request has blocks, and one whose prompt is stored has them until a step has
    told the scheduler.
    """
    for _ in range(_FORGETTING_TRIES):
        if await client.reset_prefix_cache():
            return True
        await asyncio.sleep(_FORGETTING_PAUSE_S)
    return False
