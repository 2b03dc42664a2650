"""Prompts for which there is not enough room now: a part of them, rather than nothing or somebody's
eviction (MARS, section 4.3, Opportunistic Co-Scheduler).

Admitted freely, such prompts take each other's room and are preempted in turn. Three guards keep
them from it: one at a time begins so; none does that was preempted; and a block is left for each
request that decodes.
"""

from typing import Any

from vllm.v1.request import RequestStatus


class Parts:
    """Which call has begun without room for all of it, and how much of a chunk there is room for.

    Args:
        scheduler: vLLM's, whose running requests and blocks are looked at.
        block_tokens: tokens of a block.

    Attributes:
        current: the request that has begun so, and still computes its prompt; None: nobody's.
    """

    def __init__(self, scheduler: Any, block_tokens: int) -> None:
        self._scheduler = scheduler
        self._block_tokens = block_tokens
        self.current: str | None = None

    def new_step(self) -> None:
        """Look whether it still does."""
        if self.current is None:
            return
        one = self._scheduler.requests.get(self.current)
        if one is None or one.status != RequestStatus.RUNNING or not one.is_prefill_chunk:
            self.current = None

    def fitting(self, request: Any, start: int, tokens: int, keeps: bool) -> int:
        """How many tokens of a chunk there is room for, without preempting anybody.

        Args:
            start: how many are computed already, or found in caches.
            keeps: whether histories are kept that would give way.

        Returns:
            All of them also where it is vLLM's to say no: the call waits, or somebody is preempted.
        """
        manager = self._scheduler.kv_cache_manager
        free, size = manager.block_pool.get_num_free_blocks(), self._block_tokens
        runs = request.status == RequestStatus.RUNNING
        if free >= (start + tokens if runs else request.num_tokens) // size + 1:
            return tokens
        decodes = sum(not one.is_prefill_chunk for one in self._scheduler.running)
        if runs:
            have, evictable = len(manager.get_blocks(request.request_id).blocks[0]), 0
        else:
            if self.current is not None or request.num_preemptions:
                return tokens
            hits = manager.get_computed_blocks(request)[0].blocks[0]
            have, evictable = len(hits), sum(block.ref_cnt == 0 for block in hits)
            if -(-request.num_tokens // size) - have + evictable <= free:
                return tokens
        room = (have + free - evictable - decodes) * size - start
        if room < size:
            if runs and keeps:
                return self.whole_blocks(start, tokens, size)
            # Who runs waits for those who decode; who waits needs room for all of it.
            return 0 if runs and decodes else tokens
        if not runs:
            self.current = request.request_id
        return self.whole_blocks(start, tokens, room)

    def whole_blocks(self, start: int, tokens: int, limit: int) -> int:
        """At most ``limit`` of a chunk's tokens, up to a block's end unless that is the chunk's."""
        if tokens <= limit:
            return tokens
        end = (start + limit) // self._block_tokens * self._block_tokens
        return end - start if end > start else limit
