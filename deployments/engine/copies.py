"""Touches copies in host memory of histories, and tells a disk below it whose they are.

LMCache's server evicts what was used least lately, which would be copies of histories whose next
turns have waited longest for room.
"""

import logging
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import aiohttp
import msgspec

from conserve.identity import conversation_of
from deployments.kv_identity import cache_name
from deployments.messages import Copied
from deployments.node.lmcache_main import COPIES_PATH, FORGET_PATH

logger = logging.getLogger("ray.serve")

_TIMEOUT = aiohttp.ClientTimeout(total=2.0)
# To remove files waits for those that are being written.
_FORGET_TIMEOUT = aiohttp.ClientTimeout(total=15.0)


class Copies:
    """Remembers the prompts that this engine has left in host memory, and touches them.

    Args:
        url: of the HTTP API of the node's LMCache server.
        vllm_config: the engine's ``VllmConfig``.
        most_tokens: what host memory holds; of more prompts, the oldest are forgotten.
        disk: whether the node keeps KV on a disk, too.
    """

    def __init__(self, url: str, vllm_config: Any, most_tokens: int, *, disk: bool = False) -> None:
        self._url, self._most_tokens, self._disk = url, most_tokens, disk
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        # In how many parts LMCache has each chunk: with MLA, all ranks of a stage have the same KV.
        self._parts = parallel.pipeline_parallel_size if model.use_mla else parallel.world_size
        self._model = cache_name(model.model, vllm_config)
        self._prompts: OrderedDict[str, tuple[array[int], str]] = OrderedDict()
        self._tokens = 0
        # What the disk has of them beyond doubt, until the next turn.
        self._kept: dict[str, int] = {}
        # Conversations whose files are still to be removed.
        self._forgotten: set[str] = set()

    def keep(self, history_id: str, prompt: Sequence[int], salt: str, images: Any = ()) -> None:
        """Note the newest prompt of a history that is left in host memory."""
        if images and not self._disk:
            return
        self._drop(history_id)
        self._prompts[history_id] = array("q", _as_stored(prompt, images)), salt
        self._tokens += len(prompt)
        while self._tokens > self._most_tokens:
            self._drop(next(iter(self._prompts)))

    def kept_tokens(self, history_id: str) -> int | None:
        """Return how much of a history the disk has, for its next turn; None: it is not known."""
        return self._kept.pop(history_id, None)

    async def touch(self, history_ids: Iterable[str], *, own: bool = False) -> None:
        """Touch those that are there yet, so that all that was used before now is evicted first.

        ``own``: have the disk note them as their conversations'.
        """
        known = [(one, *found) for one in history_ids if (found := self._prompts.get(one))]
        if not known or (own and not self._disk):
            return
        try:
            async with aiohttp.ClientSession(self._url, timeout=_TIMEOUT) as session:
                for history_id, prompt, salt in known:
                    owner = conversation_of(history_id) if own else ""
                    said = Copied(self._model, self._parts, prompt.tolist(), salt, owner)
                    async with session.post(COPIES_PATH, data=msgspec.json.encode(said)) as answer:
                        answer.raise_for_status()
                        if own and history_id in self._prompts:
                            self._kept[history_id] = (await answer.json())["kept_tokens"]
        except (aiohttp.ClientError, TimeoutError) as error:
            logger.warning("copies of turns that wait may be evicted: %s", error or "no answer")

    async def forget(self, conversations: Iterable[str]) -> None:
        """Remove the files of conversations that have been ended; what fails is tried again."""
        self._forgotten |= set(conversations if self._disk else ())
        try:
            for owner in list(self._forgotten):
                async with (
                    aiohttp.ClientSession(self._url, timeout=_FORGET_TIMEOUT) as session,
                    session.post(FORGET_PATH, data=owner.encode()) as answer,
                ):
                    answer.raise_for_status()
                    self._forgotten.discard(owner)
        except (aiohttp.ClientError, TimeoutError) as error:
            logger.warning("files of ended conversations are still there: %s", error or "no answer")

    def _drop(self, history_id: str) -> None:
        prompt, _ = self._prompts.pop(history_id, ((), ""))
        self._tokens -= len(prompt)
        self._kept.pop(history_id, None)


def _as_stored(prompt: Sequence[int], images: Any) -> Sequence[int]:
    """Return a prompt's token ids as LMCache's keys have them, with values of images."""
    if not images:
        return prompt
    import torch
    from lmcache.integration.vllm.utils import apply_mm_hashes_to_token_ids

    identifiers, places = map(list, zip(*images, strict=True))
    ids: list[int] = apply_mm_hashes_to_token_ids(
        torch.tensor(prompt), identifiers, places
    ).tolist()
    return ids
