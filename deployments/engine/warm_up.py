"""Warms an engine up at its start, and tries its cache, and what handing a prompt over costs it.

A prompt that is handed over is stored, looked up and loaded, and its end is computed again. An
engine tries that alone: it computes a prompt as a prefiller would, forgets it, and takes it back.
Engines start side by side, so the same prompt may take twice as long a second later. What a
prompt's iterations took is therefore left out, and the fastest of several loads counts.

vLLM keeps KV in whole units, of 16 tokens or of 784 as the model has it. A cache that never finds
anything has the same metrics as one that is cold, so the engine sends a prompt several times.
"""

import asyncio
import dataclasses
import functools
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import msgspec

from conserve.turn import TurnStats
from conserve.wire import CHECK_PREFIX, CHUNK_TOKENS, PREFILL_PREFIX
from deployments.answers import CacheCheck
from deployments.engine.reporter import LoadMeter
from deployments.messages import EngineInfo

logger = logging.getLogger("ray.serve")

Ask = Callable[[], Awaitable[Any]]

WARM_UP_TIMEOUT_S = 300.0
# None is whole chunks of LMCache's.
TRIED_TOKENS = (300, 1_500)
_LOADS = 3
_FORGETTING_TRIES = 20
_FORGETTING_PAUSE_S = 0.01
# An engine of use computes these within a second. vLLM may leave the last unit out, for drafts.
_CHECKED_TOKENS, _CHECKED_UNITS, _REST_TOKENS, _CHECK_TIMEOUT_S = 8_192, 3, 8, 30.0


class WarmUp:
    """Sends an engine turns of its own, by HTTP."""

    def __init__(self, client: Any, meter: LoadMeter, info: EngineInfo, model: str) -> None:
        self._client = client
        self._meter = meter
        self._info = info
        self._model = model

    async def run(self) -> EngineInfo:
        """Serve a few turns, since the first of each kind takes many times as long.

        They are a prompt of several chunks, then the same with more appended (a prefix found in the
        cache), then some at the same time. Returns the engine's description, with what was tried.
        """
        started_s = time.monotonic()
        # A word is roughly a token. The prompt is unlike any client's, so no client finds its KV.
        words = min(600, self._info.max_model_len // 4)
        prompts = [f"{self._info.id} " + "warm up " * (words // 2)]
        prompts.append(prompts[0] + "again " * (words // 4))
        timeout = aiohttp.ClientTimeout(WARM_UP_TIMEOUT_S)
        async with aiohttp.ClientSession(self._info.url, timeout=timeout) as session:
            for prompt in prompts:
                await self._turn(session, prompt)
            self._meter.forget()
            more = (f"{prompt} {number}" for number in range(2) for prompt in prompts)
            await asyncio.gather(*(self._turn(session, prompt) for prompt in more))
            handoffs = await self._try_lengths(session)
            check = await self._check_cache(session)
        lasted_s = time.monotonic() - started_s
        logger.info("%s %s warm after %.1f s", self._info.role, self._info.id, lasted_s)
        return dataclasses.replace(self._info, handoffs=handoffs, cache_check=check)

    async def _check_cache(self, session: aiohttp.ClientSession) -> CacheCheck:
        """Send a prompt, the same again, one with more behind it, and one that was forgotten.

        What they leave belongs to no conversation, so caches evict it before what is used.
        """
        config, info, began_s = self._client.vllm_config, self._info, time.monotonic()
        cache, transfer = config.cache_config, config.kv_transfer_config
        chunk = transfer.kv_connector_extra_config[CHUNK_TOKENS] if transfer.is_kv_producer else 0
        most = min(info.max_model_len, info.capacity_tokens, _CHECKED_TOKENS)
        check = CacheCheck(math.lcm(cache.block_size, cache.mamba_block_size or 1))
        check.sent_tokens = prompt_tokens(check.unit_tokens, chunk, most)
        longer = self._ids("check", check.sent_tokens + _REST_TOKENS)
        prompt = longer[:-_REST_TOKENS]
        try:
            async with asyncio.timeout(_CHECK_TIMEOUT_S):
                if prompt:
                    await self._found(session, prompt)
                    check.again_tokens, _ = await self._found(session, prompt)
                    check.appended_tokens, _ = await self._found(session, longer)
                for _ in range(_LOADS if prompt and chunk else 0):
                    if not check.host_tokens and await forget(self._client):
                        _, check.host_tokens = await self._found(session, prompt)
            check.problem = problem(check, most)
        except Exception as error:
            check.problem = f"its cache could not be checked: {error!r}"
        check.lasted_s = round(time.monotonic() - began_s, 3)
        host = "" if check.host_tokens is None else f" ({check.host_tokens:,} in host memory)"
        (logger.warning if check.problem else logger.info)(
            f"{info.role} {info.id} found {check.again_tokens:,} of {check.sent_tokens:,} tokens"
            f"{host}; this model's cache works in units of {check.unit_tokens:,} tokens"
            f"{check.problem and f': {check.problem}'}"
        )
        return check

    async def _found(self, session: aiohttp.ClientSession, ids: list[int]) -> tuple[int, int]:
        """Return how many tokens the engine's own cache has, and LMCache beyond them."""
        answer = await self._prompt(session, PREFILL_PREFIX, ids)
        done = msgspec.json.decode(answer, type=TurnStats)
        if done.prefilled_tokens != len(ids):
            raise RuntimeError(f"the engine answers {answer[:200].decode()}")
        loaded = done.prefiller_lmcache_tokens
        return (done.prefiller_cached_tokens or 0) - loaded, loaded

    async def _try_lengths(self, session: aiohttp.ClientSession) -> tuple[tuple[int, float], ...]:
        """Compute prompts of several lengths, here and as if they were handed over.

        The table learns from their iterations what work takes before the first turn comes.
        """
        most = self._info.max_model_len // 2
        # Other roles neither store nor load, or keep the blocks that they store for a while.
        hands_over = self._client.vllm_config.kv_transfer_config.kv_role == "kv_both"
        handoffs = []
        for tokens in sorted({min(tokens, most) for tokens in TRIED_TOKENS}):
            ask = functools.partial(self._prompt, session)
            compute = functools.partial(ask, "", self._ids("here", tokens))
            if not hands_over:
                await compute()
                continue
            away = self._ids("away", tokens)
            store = functools.partial(ask, PREFILL_PREFIX, away)
            load = functools.partial(ask, "", away)
            cost_s = await try_handoff(self._client, self._meter, compute, store, load, tokens)
            if cost_s is not None:
                handoffs.append((tokens, cost_s))
        if hands_over:
            costs = ", ".join(f"{cost_s:.3f} s for {tokens} tokens" for tokens, cost_s in handoffs)
            known = costs or "nothing known"
            logger.info("%s %s: handing over costs %s", self._info.role, self._info.id, known)
        return tuple(handoffs)

    def _ids(self, name: str, tokens: int) -> list[int]:
        size = self._client.vllm_config.model_config.get_vocab_size()
        draw = random.Random(f"{self._info.id} {name} {tokens}")
        # The first and last ones of a vocabulary may be special.
        return [draw.randrange(size // 4, size // 2) for _ in range(tokens)]

    async def _prompt(self, session: aiohttp.ClientSession, prefix: str, ids: list[int]) -> bytes:
        body = {"model": self._model, "prompt": ids, "max_tokens": 1}
        return await _post(session, prefix + "/v1/completions", body)

    async def _turn(self, session: aiohttp.ClientSession, prompt: str) -> None:
        chat = {"model": self._model, "messages": [{"role": "user", "content": prompt}]}
        # A model without a chat template refuses the first two, and is warmed up by the third.
        await _post(session, CHECK_PREFIX + "/v1/chat/completions", chat)
        await _post(session, "/v1/chat/completions", {**chat, "max_tokens": 8, "stream": True})
        completion = {"model": self._model, "prompt": prompt, "max_tokens": 4}
        await _post(session, "/v1/completions", completion)


async def _post(session: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> bytes:
    async with session.post(path, json=body) as response:
        answer = await response.read()
        if response.status >= 500:
            raise RuntimeError(f"the engine failed a request of its own ({response.status})")
        return answer


async def try_handoff(
    client: Any, meter: LoadMeter, compute: Ask, store: Ask, load: Ask, tokens: int
) -> float | None:
    """Return the seconds by which a prompt takes longer when it is handed over.

    The engine computes a prompt of ``tokens`` tokens, computes and stores another one, forgets it
    and loads it. None if no load has found anything.
    """
    here_s = await _beside_steps_s(meter, compute)
    away_s = await _beside_steps_s(meter, store)
    loads_s = []
    for _ in range(_LOADS):
        if not await forget(client):
            continue
        before, began_s = meter.prompt_tokens, time.monotonic()
        await load()
        # Keys are found some milliseconds after a prompt is stored: until then it is computed.
        if meter.prompt_tokens - before < tokens:
            loads_s.append(time.monotonic() - began_s)
    if not loads_s:
        return None
    return max(0.0, away_s - here_s) + min(loads_s)


async def _beside_steps_s(meter: LoadMeter, ask: Ask) -> float:
    """Return the seconds that a request takes beside its iterations."""
    before_s, began_s = meter.steps_s, time.monotonic()
    await ask()
    return time.monotonic() - began_s - (meter.steps_s - before_s)


async def forget(client: Any) -> bool:
    """Have an ``AsyncLLM`` forget its prefix cache; returns whether it has.

    It refuses while a request has blocks, which one that is stored keeps until the next step.
    """
    for _ in range(_FORGETTING_TRIES):
        if await client.reset_prefix_cache():
            return True
        await asyncio.sleep(_FORGETTING_PAUSE_S)
    return False


def prompt_tokens(unit: int, chunk: int, most_tokens: int) -> int:
    """Return the length of a prompt, with whole chunks if any fit, that is found; 0: none fits."""
    for one in (math.lcm(unit, chunk or 1), unit):
        if units := min(_CHECKED_UNITS, max(0, most_tokens - 2 * _REST_TOKENS) // one):
            return one * units + _REST_TOKENS
    return 0


def problem(check: CacheCheck, most_tokens: int) -> str:
    """Return what is not found, what that costs, and what to change; empty: all is found."""
    again = "engines compute whole conversations again with each turn"
    if not check.sent_tokens:
        return (
            f"nothing is found of prompts of up to {most_tokens:,} tokens, so {again}: set a "
            f"smaller engine.block_size than {check.unit_tokens:,}, or a larger max_model_len"
        )
    if not (check.again_tokens and check.appended_tokens):
        return (
            f"a prompt that comes again, or with more behind it, is not found, so {again}: leave "
            "out engine arguments that change the cache (block_size, speculative_config)"
        )
    if check.host_tokens == 0:
        return "host memory keeps nothing, so moves compute prompts again: raise lmcache.size_gb"
    return ""
