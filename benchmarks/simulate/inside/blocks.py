"""The blocks of one engine's KV."""

from collections import OrderedDict


class Blocks:
    """Counts blocks, by conversation; a conversation's are a beginning of its history.

    A block is held by a call that runs; kept for a conversation between turns; cached, and evicted
    when room is needed (the longest unused first, of one from its end, as vLLM does it); or empty.
    The last two are free.
    """

    def __init__(self, total: int, block_tokens: int = 16) -> None:
        self.total = total
        self.block_tokens = block_tokens
        self.held: dict[str, int] = {}
        self.kept: dict[str, int] = {}
        self.cached: OrderedDict[str, int] = OrderedDict()
        self.free = total
        self.evicted = 0
        self._cached_blocks = 0

    def count(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def found(self, key: str) -> int:
        return self.kept.get(key, 0) + self.cached.get(key, 0)

    def has_room(self, key: str, blocks: int) -> bool:
        """Whether a conversation can hold this many, of which it may have some already."""
        have = self.held.get(key, 0) + self.kept.get(key, 0)
        return blocks - have <= self.free

    def hold(self, key: str, blocks: int) -> None:
        """Have a conversation hold this many in all; ValueError: no room, ask `has_room`."""
        if not self.has_room(key, blocks):
            raise ValueError(f"{key}: no room for {blocks} blocks; {self.free} are free")
        have = self.held.get(key, 0)
        self.free += self.kept.pop(key, 0)
        self._cached_blocks -= self.cached.pop(key, 0)
        if blocks > have:
            self.held[key] = blocks
            self.free -= blocks - have
        while self._cached_blocks > self.free:
            oldest = next(iter(self.cached))
            gone = min(self.cached[oldest], self._cached_blocks - self.free)
            self._uncache(oldest, gone)
            self.evicted += gone

    def let_go(self, key: str, computed_tokens: int) -> None:
        """End or preempt a call: what it has computed stays cached, in whole blocks."""
        self.free += self.held.pop(key, 0)
        self._cache(key, computed_tokens // self.block_tokens)

    def keep(self, key: str) -> int:
        """Keep what is cached of a conversation; return how many blocks that are."""
        blocks = self.cached.get(key, 0)
        self._uncache(key, blocks)
        if blocks:
            self.kept[key] = self.kept.get(key, 0) + blocks
            self.free -= blocks
        return blocks

    def unkeep(self, key: str, blocks: int | None = None) -> int:
        """Return kept blocks to the cache, from the end on (None: all)."""
        have = self.kept.get(key, 0)
        given = have if blocks is None else min(have, blocks)
        if given == have:
            self.kept.pop(key, None)
        else:
            self.kept[key] = have - given
        self.free += given
        self._cache(key, given)
        return given

    def drop(self, key: str) -> None:
        self.unkeep(key)
        self._uncache(key, self.cached.get(key, 0))

    def _cache(self, key: str, blocks: int) -> None:
        if blocks:
            self.cached[key] = self.cached.get(key, 0) + blocks
            self.cached.move_to_end(key)
            self._cached_blocks += blocks

    def _uncache(self, key: str, blocks: int) -> None:
        if blocks:
            left = self.cached[key] - blocks
            if left:
                self.cached[key] = left
            else:
                del self.cached[key]
            self._cached_blocks -= blocks
