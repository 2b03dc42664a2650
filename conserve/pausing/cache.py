"""Follows what engines' caches and host memory have of histories, and what they should have."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from math import inf

# Memory that is fuller than this evicts the oldest for all that comes.
_FULL = 0.9


class EngineCache:
    """Histories whose KV is kept, the longest unused first.

    vLLM takes the blocks of ended requests that are unused for longest first, and of one request
    the last ones first; so do LMCache's server and this. It errs where histories share a beginning
    (each counts with what it has beyond that), and where a turn that was cut left less than
    expected.
    """

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity_tokens = capacity_tokens
        self._left: OrderedDict[str, int] = OrderedDict()
        self._used_s: dict[str, float] = {}
        self.tokens = 0

    def __iter__(self) -> Iterator[str]:
        return iter(self._left)

    def __contains__(self, history_id: str) -> bool:
        return history_id in self._left

    def left_tokens(self, history_id: str) -> int:
        """Return how many of a history's tokens are there yet, from its beginning on."""
        return self._left.get(history_id, 0)

    def used_s(self, history_id: str) -> float:
        return self._used_s[history_id]

    @property
    def is_full(self) -> bool:
        return self.tokens >= _FULL * self._capacity_tokens

    @property
    def oldest_s(self) -> float:
        """Return when the oldest was used: what was used before then is gone."""
        return next((self._used_s[one] for one in self._left), inf)

    def resize(self, capacity_tokens: int) -> list[str]:
        """Change the room, and return the histories of which nothing is left then."""
        self._capacity_tokens = capacity_tokens
        return self._free(0)

    def use(self, history_id: str, tokens: int, now_s: float) -> list[str]:
        """Note what a history has there, and return those of which nothing is left then."""
        left = self._left
        self.tokens += tokens - left.get(history_id, 0)
        left[history_id] = tokens
        left.move_to_end(history_id)
        self._used_s[history_id] = now_s
        return self._free(1) if self.tokens > self._capacity_tokens else []

    def drop(self, history_id: str) -> None:
        self.tokens -= self._left.pop(history_id, 0)
        self._used_s.pop(history_id, None)

    def _free(self, stay: int) -> list[str]:
        gone = []
        while self.tokens > self._capacity_tokens and len(self._left) > stay:
            oldest, left = next(iter(self._left.items()))
            lost = min(left, self.tokens - self._capacity_tokens)
            self.tokens -= lost
            if lost == left:
                del self._left[oldest], self._used_s[oldest]
                gone.append(oldest)
            else:
                self._left[oldest] = left - lost
        return gone


class HostMemory:
    """Histories of which host memory has a copy, the longest unused first.

    As in `EngineCache` the oldest are evicted first, each from its end on. The age of the oldest is
    what others may reach, at the recent rate of new KV.
    """

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        self._cache = EngineCache(capacity_tokens)
        self._shared: dict[str, int] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._cache

    @property
    def tokens(self) -> int:
        return self._cache.tokens

    @property
    def oldest_s(self) -> float:
        """Return when the oldest was used, which is evicted next; -inf while there is room."""
        return self._cache.oldest_s if self._cache.is_full else -inf

    def left_tokens(self, key: str) -> int:
        if key not in self._cache:
            return 0
        return self._cache.left_tokens(key) + self._shared[key]

    def keeps(self, key: str, for_s: float) -> bool:
        return key in self._cache and self._cache.used_s(key) - self.oldest_s >= for_s

    def resize(self, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        for gone in self._cache.resize(capacity_tokens):
            del self._shared[gone]

    def use(self, key: str, tokens: int, now_s: float, shared_tokens: int = 0) -> None:
        """Note that at least so much of a history is there now.

        ``shared_tokens`` of it others begin with: they are there once, and counted with the first.
        """
        tokens = max(tokens, self.left_tokens(key))
        shared_tokens = self._shared[key] = min(shared_tokens, tokens)
        # Of a history that is longer than the memory, only the beginning stays.
        own_tokens = min(tokens - shared_tokens, self.capacity_tokens)
        for gone in self._cache.use(key, own_tokens, now_s):
            del self._shared[gone]

    def renew(self, key: str, for_s: float, now_s: float) -> bool:
        """Use what is left of a history, unless it is kept ``for_s`` anyway; return whether so."""
        if key not in self._cache or self.keeps(key, for_s):
            return False
        self.use(key, 0, now_s, self._shared[key])
        return True

    def take_over(self, uses: Iterable[tuple[str, int, float, int]]) -> None:
        """Note what was used under a table before this one, in any order.

        Args:
            uses: arguments of `use`. Later uses that are known here stay.
        """
        used_s, shared = self._cache.used_s, self._shared
        known = [(key, self.left_tokens(key), used_s(key), shared[key]) for key in self._cache]
        new = [use for use in uses if use[0] not in self._cache or use[2] > used_s(use[0])]
        self._cache, self._shared = EngineCache(self.capacity_tokens), {}
        for key, tokens, now_s, shared_tokens in sorted(known + new, key=lambda use: use[2]):
            self.use(key, tokens, now_s, shared_tokens)

    def drop(self, key: str) -> None:
        self._cache.drop(key)
        self._shared.pop(key, None)


class WorkingSet:
    """Histories of which a turn runs or waits, or the next one is near (Denning's working set).

    It is what memories should hold of all.

    Attributes:
        tokens: what all of them hold together, but for what they share.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._tokens: dict[str, int] = {}
        # When those leave whose next turn is near. In the heap, some of them have come again.
        self._until_s: dict[str, float] = {}
        self._leaves: list[tuple[float, str]] = []

    def add(self, history_id: str, tokens: int) -> None:
        """Add a history, or have it stay, until it rests or is removed."""
        self.tokens += tokens - self._tokens.get(history_id, 0)
        self._tokens[history_id] = tokens
        self._until_s.pop(history_id, None)

    def rest(self, history_id: str, tokens: int, until_s: float) -> None:
        """Note when to remove a history, unless it is added again."""
        self.add(history_id, tokens)
        self._until_s[history_id] = until_s
        heappush(self._leaves, (until_s, history_id))

    def remove(self, history_id: str) -> None:
        self.tokens -= self._tokens.pop(history_id, 0)
        self._until_s.pop(history_id, None)

    def advance(self, now_s: float) -> None:
        while self._leaves and self._leaves[0][0] <= now_s:
            until_s, history_id = heappop(self._leaves)
            if self._until_s.get(history_id) == until_s:
                self.remove(history_id)
