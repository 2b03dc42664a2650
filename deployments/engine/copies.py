"""Touches copies in host memory of histories whose next turns wait for room.

LMCache's server evicts what was used least lately, which would be what has waited longest. Of all
that it can be asked, only a prefetch from a further tier touches what is there and locks nothing;
without such a tier, it does no more than that.
"""

import logging
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import aiohttp
import msgspec

from deployments.kv_identity import cache_name

logger = logging.getLogger("ray.serve")

_JSON = {"Content-Type": "application/json"}
_TIMEOUT = aiohttp.ClientTimeout(total=2.0)


class Copies:
    """Remembers the prompts that this engine has left in host memory, and touches them.

    Args:
        url: of the HTTP API of the node's LMCache server.
        vllm_config: the engine's ``VllmConfig``.
        most_tokens: what host memory holds; of more prompts, the oldest are forgotten.
    """

    def __init__(self, url: str, vllm_config: Any, most_tokens: int) -> None:
        self._url, self._most_tokens = f"{url}/cache/prefetches", most_tokens
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        # In how many parts LMCache has each chunk: with MLA, all ranks of a stage have the same KV.
        parts = parallel.pipeline_parallel_size if model.use_mla else parallel.world_size
        self._names = {"model_name": cache_name(model.model, vllm_config), "world_size": parts}
        self._prompts: OrderedDict[str, tuple[array[int], str]] = OrderedDict()
        self._tokens = 0
        # Prefetches whose end LMCache's server remembers until it is asked.
        self._open: set[str] = set()

    def keep(self, history_id: str, prompt: Sequence[int], salt: str) -> None:
        """Note the newest prompt of a history that is left in host memory."""
        self._drop(history_id)
        self._prompts[history_id] = array("I", prompt), salt
        self._tokens += len(prompt)
        while self._tokens > self._most_tokens:
            self._drop(next(iter(self._prompts)))

    async def touch(self, history_ids: Iterable[str]) -> None:
        """Touch those that are there yet, so that all that was used before now is evicted first."""
        known = [found for one in history_ids if (found := self._prompts.get(one)) is not None]
        if not known:
            return
        try:
            async with aiohttp.ClientSession(timeout=_TIMEOUT, headers=_JSON) as session:
                for request_id in list(self._open):
                    async with session.get(f"{self._url}/{request_id}") as answer:
                        if (await answer.json()).get("status") != "pending":
                            self._open.discard(request_id)
                for prompt, salt in known:
                    body = {**self._names, "token_ids": prompt.tolist(), "cache_salt": salt}
                    async with session.post(self._url, data=msgspec.json.encode(body)) as answer:
                        answer.raise_for_status()
                        if (request_id := (await answer.json()).get("request_id")) is not None:
                            self._open.add(request_id)
        except (aiohttp.ClientError, TimeoutError) as error:
            logger.warning("copies of turns that wait may be evicted: %s", error or "no answer")

    def _drop(self, history_id: str) -> None:
        prompt, _ = self._prompts.pop(history_id, ((), ""))
        self._tokens -= len(prompt)
