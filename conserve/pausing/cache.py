"""Follows what engines' caches and host memory have of histories, and what they should have."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from math import inf

# Memory that is fuller than this evicts the oldest for all that comes.
_FULL = 0.9


# A history of which nothing is left.
_NOTHING = (0, 0, -inf)


class EngineCache:
    """Histories whose KV is kept, the longest unused first.

    vLLM takes the blocks of ended requests that are unused for longest first, and of one request
    the last ones first; so do LMCache's server and this. It errs where histories share a beginning
    (each counts with what it has beyond that), and where a turn that was cut left less than
    expected.
    """

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        # By history: what is left beyond what it shares, what it shares, and when it was used.
        self._kept: OrderedDict[str, tuple[int, int, float]] = OrderedDict()
        self.tokens = 0

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __contains__(self, history_id: str) -> bool:
        return history_id in self._kept

    def left_tokens(self, history_id: str) -> int:
        """Return how many of a history's tokens are there yet, from its beginning on."""
        own_tokens, shared_tokens, _ = self._kept.get(history_id, _NOTHING)
        return own_tokens + shared_tokens

    @property
    def oldest_s(self) -> float:
        """Return when the oldest was used: what was used before then is gone."""
        return next((used_s for _, _, used_s in self._kept.values()), inf)

    def use(
        self, history_id: str, own_tokens: int, now_s: float, shared_tokens: int = 0
    ) -> list[str]:
        """Note what a history has there, and return those of which nothing is left then."""
        self.tokens += own_tokens - self._kept.get(history_id, _NOTHING)[0]
        self._kept[history_id] = (own_tokens, shared_tokens, now_s)
        self._kept.move_to_end(history_id)
        return self._free(1) if self.tokens > self.capacity_tokens else []

    def drop(self, history_id: str) -> None:
        self.tokens -= self._kept.pop(history_id, _NOTHING)[0]

    def _free(self, stay: int) -> list[str]:
        gone = []
        while self.tokens > self.capacity_tokens and len(self._kept) > stay:
            oldest, (left, shared_tokens, used_s) = next(iter(self._kept.items()))
            lost = min(left, self.tokens - self.capacity_tokens)
            self.tokens -= lost
            if lost == left:
                del self._kept[oldest]
                gone.append(oldest)
            else:
                self._kept[oldest] = (left - lost, shared_tokens, used_s)
        return gone


class HostMemory(EngineCache):
    """Histories of which host memory has a copy.

    The age of the oldest is what others may reach, at the recent rate of new KV.
    """

    @property
    def oldest_s(self) -> float:
        """Return when the oldest was used, which is evicted next; -inf while there is room."""
        return super().oldest_s if self.tokens >= _FULL * self.capacity_tokens else -inf

    def keeps(self, key: str, for_s: float) -> bool:
        return key in self and self._kept[key][2] - self.oldest_s >= for_s

    def resize(self, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        self._free(0)

    def use(self, key: str, tokens: int, now_s: float, shared_tokens: int = 0) -> list[str]:
        """Note that at least so much of a history is there now.

        ``shared_tokens`` of it others begin with: they are there once, and counted with the first.
        """
        tokens = max(tokens, self.left_tokens(key))
        shared_tokens = min(shared_tokens, tokens)
        # Of a history that is longer than the memory, only the beginning stays.
        own_tokens = min(tokens - shared_tokens, self.capacity_tokens)
        return super().use(key, own_tokens, now_s, shared_tokens)

    def renew(self, key: str, for_s: float, now_s: float) -> bool:
        """Use what is left of a history, unless it is kept ``for_s`` anyway; return whether so."""
        if key not in self or self.keeps(key, for_s):
            return False
        self.use(key, 0, now_s, self._kept[key][1])
        return True

    def take_over(self, uses: Iterable[tuple[str, int, float, int]]) -> None:
        """Note what was used under a table before this one, in any order.

        Args:
            uses: arguments of `use`. Later uses that are known here stay.
        """
        known = [
            (key, own + shared, at_s, shared) for key, (own, shared, at_s) in self._kept.items()
        ]
        new = [use for use in uses if use[2] > self._kept.get(use[0], _NOTHING)[2]]
        self._kept.clear()
        self.tokens = 0
        for use in sorted(known + new, key=lambda use: use[2]):
            self.use(*use)


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
