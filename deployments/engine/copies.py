"""Touches copies in host memory of histories whose next turns wait for room, and loads others.

LMCache's server evicts what was used least lately, which would be what has waited longest. Of all
that it can be asked, only a prefetch from a further tier touches what is there and locks nothing;
without such a tier, it does no more than that.
"""

import asyncio
import logging
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp
import msgspec

from conserve.identity import conversation_of
from conserve.turn import TurnStats
from conserve.wire import PREFILL_PREFIX
from deployments.kv_identity import cache_name
from deployments.node.kv_files import OwnFiles

logger = logging.getLogger("ray.serve")

_JSON = {"Content-Type": "application/json"}
# What waits to be written as a conversation ends is on the disk by then. A disk that fails is tried
# as often again.
_WRITTEN_S, _MOST_TRIES, _MOST_NOTED = 30.0, 120, 64
_TIMEOUT = aiohttp.ClientTimeout(total=2.0)
# A load waits for the steps of an engine, and for others' loads.
_LOAD_TIMEOUT = aiohttp.ClientTimeout(total=30.0)
_LOOK_S = 0.01


class Copies:
    """Remembers the prompts that this engine has left in host memory, and touches them.

    Args:
        url: of the HTTP API of the node's LMCache server.
        vllm_config: the engine's ``VllmConfig``.
        most_tokens: what host memory holds; of more prompts, the oldest are forgotten.
        chunk_tokens: how many tokens are one key there.
        disk_path: of the node's disk for KV; None: there is none.
    """

    def __init__(
        self,
        url: str,
        vllm_config: Any,
        most_tokens: int,
        chunk_tokens: int,
        disk_path: str | None = None,
    ) -> None:
        self._url, self._most_tokens = f"{url}/cache/prefetches", most_tokens
        self._chunk_tokens = chunk_tokens
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        # In how many parts LMCache has each chunk: with MLA, all ranks of a stage have the same KV.
        parts = parallel.pipeline_parallel_size if model.use_mla else parallel.world_size
        name = cache_name(model.model, vllm_config)
        self._names = {"model_name": name, "world_size": parts}
        self._files = None if disk_path is None else OwnFiles(disk_path, name, chunk_tokens)
        # What the disk has of histories beyond doubt, until their next turns.
        self._kept: dict[str, int] = {}
        self._thread, self._noting = ThreadPoolExecutor(1, "kv-files"), 0
        self._prompts: OrderedDict[str, tuple[array[int], str, bool, str]] = OrderedDict()
        self._tokens = 0
        # Prefetches whose end LMCache's server remembers until it is asked.
        self._open: set[str] = set()

    def keep(
        self, history_id: str, prompt: Sequence[int], salt: str, images: Any = (), model: str = ""
    ) -> None:
        """Note the newest prompt of a history that is left in host memory.

        ``model`` is an adapter's name for engines; empty: the prompt is of the model itself.
        """
        if images and self._files is None:
            return
        self._drop(history_id)
        self._prompts[history_id] = (
            array("q", _as_stored(prompt, images)), salt, not images, model,
        )  # fmt: skip
        self._tokens += len(prompt)
        while self._tokens > self._most_tokens:
            self._drop(next(iter(self._prompts)))

    async def touch(self, history_ids: Iterable[str]) -> None:
        """Touch those that are there yet, so that all that was used before now is evicted first."""
        known = [found for one in history_ids if (found := self._prompts.get(one)) is not None]
        # With a further tier LMCache would load what host memory lacks; nothing is lost there.
        if not known or self._files is not None:
            return
        try:
            async with aiohttp.ClientSession(timeout=_TIMEOUT, headers=_JSON) as session:
                for known_id in list(self._open):
                    async with session.get(f"{self._url}/{known_id}") as answer:
                        if (await answer.json()).get("status") != "pending":
                            self._open.discard(known_id)
                for prompt, salt, _, _ in known:
                    if (request_id := await self._look_up(session, prompt, salt)) is not None:
                        self._open.add(request_id)
        except (aiohttp.ClientError, TimeoutError) as error:
            logger.warning("copies of turns that wait may be evicted: %s", error or "no answer")

    def kept_tokens(self, history_id: str) -> int | None:
        """Return how much of a history the disk has, for its next turn; None: it is not known."""
        return self._kept.pop(history_id, None)

    async def own(self, history_id: str) -> None:
        """Note on the disk whose the files of a history's newest prompt are."""
        if self._files is None or history_id not in self._prompts or self._noting >= _MOST_NOTED:
            return
        given = conversation_of(history_id), *self._prompts[history_id][:2]
        self._noting += 1
        try:
            self._kept[history_id] = await self._on_disk(self._files.note, *given)
        except OSError as error:
            logger.warning("files of %s would not be removed with it: %s", given[0], error)
        finally:
            self._noting -= 1

    async def forget(self, conversations: Collection[str]) -> None:
        """Remove ended conversations' files, twice: some may be written yet."""
        files, left = self._files, list(conversations)
        for tries in range(_MOST_TRIES):
            if files is None or not left:
                return
            left = [one for one in left if not await self._on_disk(files.forget, one, tries > 0)]
            await asyncio.sleep(_WRITTEN_S if left else 0)
        if left:
            logger.warning("files of %s stay, since the disk fails", ", ".join(left))

    async def _on_disk(self, work: Callable[..., Any], *given: Any) -> Any:
        # In a thread of its own: a disk may hang.
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *given)

    async def load(self, history_id: str, engine_url: str, model: str) -> int:
        """Load what host memory or the disk has of a prompt into the engine; return its tokens.

        The engine is asked for the chunks that are there and for one token more, so that it
        computes nothing that is missing. An engine has KV loaded by nothing but a request.
        """
        known = self._prompts.get(history_id)
        if known is None or not known[2]:
            return 0
        prompt, salt, _, own_model = known
        try:
            async with aiohttp.ClientSession(
                timeout=_LOAD_TIMEOUT, headers=_JSON, raise_for_status=True
            ) as session:
                if not (tokens := await self._found(session, prompt, salt)):
                    return 0
                body = {
                    "model": own_model or model,
                    "prompt": [*prompt[:tokens], prompt[-1]],
                    "max_tokens": 1,
                }
                data = msgspec.json.encode(body | ({"cache_salt": salt} if salt else {}))
                url = f"{engine_url}{PREFILL_PREFIX}/v1/completions"
                async with session.post(url, data=data) as answer:
                    done = msgspec.json.decode(await answer.read(), type=TurnStats)
                return done.prefiller_cached_tokens or 0
        except (aiohttp.ClientError, TimeoutError) as error:
            logger.warning("%s is not brought back: %s", history_id, error or "no answer")
            return 0

    async def _found(self, session: aiohttp.ClientSession, prompt: Any, salt: str) -> int:
        """Return how many tokens of a prompt are in host memory, once those of a disk are."""
        status: dict[str, Any] = {"status": "pending"}
        request_id = await self._look_up(session, prompt, salt)
        while request_id is not None and status.get("status") == "pending":
            await asyncio.sleep(_LOOK_S)
            async with session.get(f"{self._url}/{request_id}") as answer:
                status = await answer.json()
        parts = int(self._names["world_size"])
        return int(status.get("found_keys", 0)) // parts * self._chunk_tokens

    async def _look_up(self, session: aiohttp.ClientSession, prompt: Any, salt: str) -> str | None:
        body = {**self._names, "token_ids": prompt.tolist(), "cache_salt": salt}
        async with session.post(self._url, data=msgspec.json.encode(body)) as answer:
            answer.raise_for_status()
            request_id: str | None = (await answer.json()).get("request_id")
            return request_id

    def _drop(self, history_id: str) -> None:
        prompt, *_ = self._prompts.pop(history_id, ((), "", True, ""))
        self._tokens -= len(prompt)
        self._kept.pop(history_id, None)


def _as_stored(prompt: Sequence[int], images: Any) -> Sequence[int]:
    """Return a prompt's token ids as LMCache's keys have them, with values of images."""
    if not images:
        return prompt
    import torch
    from lmcache.integration.vllm.utils import apply_mm_hashes_to_token_ids

    identifiers, places = map(list, zip(*images, strict=True))
    ids = apply_mm_hashes_to_token_ids(torch.tensor(prompt), identifiers, places)
    return list(ids.tolist())
