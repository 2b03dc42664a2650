"""What host memory has of histories, and for how long it keeps it, as can be told from outside."""

from math import inf

from conserve.pausing.cache import EngineCache

# What is fuller than this takes from the oldest for whatever comes.
_FULL = 0.9


class HostMemory:
    """Histories that host memory has a copy of, the longest unused first.

    As in `EngineCache` the oldest go where room is needed, each from its end on. So what the oldest
    one has reached in age is what others may reach, at the rate at which KV has come lately.

    Args:
        capacity_tokens: so much there is room for.

    Example:
        >>> host = HostMemory(100)
        >>> host.use("early", 60, now_s=10.0)
        >>> host.oldest_s  # Nothing had to go yet.
        -inf
        >>> host.use("late", 60, now_s=50.0)
        >>> host.left_tokens("early"), host.oldest_s
        (40, 10.0)
    """

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity_tokens = capacity_tokens
        self._cache = EngineCache(capacity_tokens)
        self._used_s: dict[str, float] = {}

    def __contains__(self, history_id: str) -> bool:
        return history_id in self._cache

    @property
    def tokens(self) -> int:
        """So many are there."""
        return self._cache.tokens

    @property
    def oldest_s(self) -> float:
        """When the oldest there was used last; long ago while there is room."""
        if self._cache.tokens < _FULL * self._capacity_tokens:
            return -inf
        return self._used_s[next(iter(self._cache))]

    def left_tokens(self, history_id: str) -> int:
        """How many of a history's tokens are there, from its beginning on."""
        return self._cache.left_tokens(history_id)

    def resize(self, capacity_tokens: int) -> None:
        """There is so much room from now on; what is too much goes."""
        self._capacity_tokens = capacity_tokens
        for gone in self._cache.resize(capacity_tokens):
            del self._used_s[gone]

    def use(self, history_id: str, tokens: int, now_s: float) -> None:
        """So much of a history is left there, or as much as there was, if that is more."""
        tokens = max(tokens, self._cache.left_tokens(history_id))
        self._used_s[history_id] = now_s
        # Of one that is longer than the memory its beginning stays, at most.
        for gone in self._cache.use(history_id, min(tokens, self._capacity_tokens)):
            del self._used_s[gone]

    def drop(self, history_id: str) -> None:
        """It was not found there."""
        self._cache.drop(history_id)
        self._used_s.pop(history_id, None)
