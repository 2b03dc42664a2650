"""The histories that an engine knows, and whose blocks it keeps between turns.

A block is kept as a running request keeps it, by its reference count, so nothing else in vLLM has
to know. Kept blocks count as used (``kv_cache_usage``). They make `reset_prefix_cache` refuse, so
all are freed before that.
"""

import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from conserve_inside.policy import Pin, Retention
from conserve_inside.scheduler.turns import Turn

# Above this number of histories, or of hashes for each of the engine's blocks, the least recently
# used ones of which nothing is kept are forgotten.
_MOST = 4096
_MOST_TIMES = 4


@dataclass(slots=True)
class _History:
    # Hashes of its last turn's full blocks. They are chained: equal ones have equal beginnings.
    hashes: Sequence[bytes] = ()
    # The blocks that are kept, from its beginning on.
    blocks: list[Any] = field(default_factory=list)
    until_s: float = 0.0
    level: int = 0
    ended_s: float | None = None
    # Its turns in this engine that wait, and that run.
    waiting: int = 0
    running: int = 0


class Histories:
    """Keeps blocks of histories between turns, and counts those given up before their time."""

    def __init__(self, manager: Any, hash_block_tokens: int, retention: Retention) -> None:
        self._manager = manager
        self._pool = manager.block_pool
        self._hash_block_tokens = hash_block_tokens
        self._retention = retention
        self._all: OrderedDict[str, _History] = OrderedDict()
        self._kept: set[str] = set()
        self._next_expiry_s = math.inf
        # How many all histories have together.
        self._hashes = 0
        self.reclaimed_blocks = 0

    # --- turns -------------------------------------------------------------------------------

    def comes(self, turn: Turn, now_s: float) -> None:
        one = self._all.setdefault(turn.key, _History())
        if one.ended_s is not None and not one.waiting and not one.running:
            self._retention.returned(turn.key, now_s - one.ended_s)
        one.waiting += 1

    def runs(self, turn: Turn) -> None:
        """Free what is kept for a turn that now holds the blocks itself."""
        one = self._all.get(turn.key)
        if one is not None:
            one.waiting = max(0, one.waiting - 1)
            one.running += 1
            self._free_kept(turn.key, one)

    def waits_again(self, turn: Turn) -> None:
        one = self._all.get(turn.key)
        if one is not None:
            one.running = max(0, one.running - 1)
            one.waiting += 1

    def ends(self, turn: Turn, request: Any, level: int, now_s: float) -> None:
        """Keep the blocks of a turn that has ended, before vLLM frees them."""
        one = self._all.setdefault(turn.key, _History())
        if not turn.runs:
            # Cut while it waited. What is kept stays as if the turn had not come.
            one.waiting = max(0, one.waiting - 1)
            return
        one.running = max(0, one.running - 1)
        one.ended_s, one.level = now_s, level
        self._hashes += len(request.block_hashes) - len(one.hashes)
        one.hashes = tuple(request.block_hashes)
        hold_s = self._retention.hold_for_s(turn.key, turn.resume_s, turn.last)
        before, one.blocks = one.blocks, []
        if hold_s > 0:
            blocks = _in_order(self._manager.get_blocks(request.request_id).blocks)
            self._keep(turn.key, one, blocks, now_s + hold_s)
        self._free(before)
        self._all.move_to_end(turn.key)
        self._forget_some()

    # --- giving way --------------------------------------------------------------------------

    def expire(self, now_s: float) -> None:
        if now_s < self._next_expiry_s:
            return
        for key in list(self._kept):
            one = self._all[key]
            if one.until_s <= now_s and not one.waiting:
                self._free_kept(key, one)
        self._next_expiry_s = min(
            (one.until_s for key in self._kept if not (one := self._all[key]).waiting),
            default=math.inf,
        )
        if any(self._all[key].waiting for key in self._kept):
            self._next_expiry_s = min(self._next_expiry_s, now_s + 1.0)

    def give_up(self, blocks: int, now_s: float, but: str | None = None) -> bool:
        """Give up the last kept blocks of a history; returns whether there were any."""
        pins = {
            key: Pin(one.level, len(one.blocks), one.until_s, one.waiting > 0)
            for key in self._kept
            if key != but and (one := self._all[key])
        }
        order = self._retention.give_up_order(pins, now_s)
        if not order:
            return False
        one = self._all[order[0]]
        given, one.blocks = one.blocks[-blocks:], one.blocks[:-blocks]
        if not one.blocks:
            self._kept.discard(order[0])
        self.reclaimed_blocks += len(given)
        self._free(given)
        return True

    @property
    def keeps_any(self) -> bool:
        return bool(self._kept)

    @property
    def kept_blocks(self) -> int:
        return len({block.block_id for key in self._kept for block in self._all[key].blocks})

    def free_without_kept(self) -> int:
        kept: dict[int, int] = {}
        for key in self._kept:
            for block in self._all[key].blocks:
                kept[block.block_id] = kept.get(block.block_id, 0) + 1
        blocks = self._pool.blocks
        free = int(self._pool.get_num_free_blocks())
        return free + sum(int(blocks[at].ref_cnt == count) for at, count in kept.items())

    # --- commands ----------------------------------------------------------------------------

    def pin(self, key: str, ttl_s: float, now_s: float) -> int:
        """Keep what is cached of an idle history for so long; returns how many blocks that are."""
        one = self._all.get(key)
        if one is None or one.running:
            return 0
        before, one.blocks = one.blocks, []
        self._keep(key, one, self._cached(one)[0], now_s + ttl_s)
        self._free(before)
        if not one.blocks:
            self._kept.discard(key)
        return len(one.blocks)

    def release(self, key: str) -> int:
        """Have an idle history's blocks evicted next, but for those of others; returns how many."""
        one = self._all.get(key)
        if one is None or one.running or one.waiting:
            return 0
        self._free_kept(key, one)
        blocks, tokens = self._cached(one)
        shared = self._shared_hashes(key) * self._hash_block_tokens
        if shared and tokens:
            blocks = blocks[math.ceil(len(blocks) * min(1.0, shared / tokens)) :]
        idle = [block for block in blocks if block.ref_cnt == 0 and not block.is_null]
        queue = self._pool.free_block_queue
        for block in idle:
            queue.remove(block)
        queue.prepend_n(idle[::-1])
        self._forget(key)
        self._retention.forget(key)
        return len(idle)

    def release_all(self) -> None:
        for key in list(self._kept):
            self._free_kept(key, self._all[key])

    def cached_tokens(self, key: str) -> int:
        """Return how much of a history, as its last turn left it, the cache has now."""
        one = self._all.get(key)
        return 0 if one is None else self._cached(one)[1]

    def kept_for_s(self, key: str, now_s: float) -> float:
        """Return for how long what is kept of a history stays kept."""
        return max(0.0, self._all[key].until_s - now_s) if key in self._kept else 0.0

    def keys(self) -> list[str]:
        return list(self._all)

    # --- inside ------------------------------------------------------------------------------

    def _keep(self, key: str, one: _History, blocks: list[Any], until_s: float) -> None:
        self._pool.touch(blocks)
        one.blocks, one.until_s = blocks, until_s
        if blocks:
            self._kept.add(key)
            self._next_expiry_s = min(self._next_expiry_s, until_s)

    def _free_kept(self, key: str, one: _History) -> None:
        blocks, one.blocks = one.blocks, []
        self._kept.discard(key)
        self._free(blocks)

    def _free(self, blocks: list[Any]) -> None:
        # A history's end is evicted first.
        self._pool.free_blocks(reversed(blocks))

    def _cached(self, one: _History) -> tuple[list[Any], int]:
        if not one.hashes:
            return [], 0
        groups, tokens, _ = self._manager.coordinator.find_longest_cache_hit(
            list(one.hashes), len(one.hashes) * self._hash_block_tokens
        )
        return _in_order(groups), int(tokens)

    def _shared_hashes(self, key: str) -> int:
        """Return how many of a history's leading hashes another history has, too."""
        own, most = self._all[key].hashes, 0
        for other, one in self._all.items():
            if other == key:
                continue
            low, high = most, min(len(own), len(one.hashes))
            if high <= low or own[low] != one.hashes[low]:
                continue
            # They are chained, so where two are equal, all before them are.
            rest = range(low, high)
            most += bisect_left(rest, True, key=lambda at: own[at] != one.hashes[at])
        return most

    def _forget_some(self) -> None:
        most_hashes = _MOST_TIMES * self._pool.num_gpu_blocks
        if len(self._all) <= _MOST and self._hashes <= most_hashes:
            return
        for key, one in list(self._all.items()):
            if key not in self._kept and not one.waiting and not one.running:
                self._forget(key)
            if len(self._all) <= _MOST and self._hashes <= most_hashes:
                return

    def _forget(self, key: str) -> None:
        self._hashes -= len(self._all.pop(key).hashes)


def _in_order(groups: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the blocks of all kinds of layers that can be found again, from the beginning on."""
    return [
        block
        for at_once in zip_longest(*groups)
        for block in at_once
        if block is not None and not block.is_null and block.block_hash is not None
    ]
