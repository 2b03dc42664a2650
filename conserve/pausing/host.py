"""Follows what host memory has of histories, and for how long, as can be told from outside."""

from collections.abc import Iterable
from math import inf
from typing import NamedTuple

from conserve.pausing.cache import EngineCache

# What is fuller than this takes from the oldest for whatever comes.
_FULL = 0.9


class _Use(NamedTuple):
    now_s: float
    shared_tokens: int


class HostMemory:
    """Histories that host memory has a copy of, the longest unused first.

    As in `EngineCache` the oldest go where room is needed, each from its end on. So the age that
    the oldest one has reached is what others may reach, at the rate at which KV has come lately.

    Args:
        capacity_tokens: so much there is room for.

    Example:
        >>> host = HostMemory(100)
        >>> host.use("early", 60, now_s=10.0)
        >>> host.keeps("early", for_s=1e9)  # Nothing had to go yet.
        True
        >>> host.use("late", 60, now_s=50.0)
        >>> [host.left_tokens(name) for name in ("early", "late")]
        [40, 60]
        >>> host.keeps("early", for_s=1.0), host.keeps("late", for_s=30.0)
        (False, True)
    """

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity_tokens = capacity_tokens
        self._cache = EngineCache(capacity_tokens)
        self._uses: dict[str, _Use] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._cache

    @property
    def tokens(self) -> int:
        """So many are there."""
        return self._cache.tokens

    def left_tokens(self, key: str) -> int:
        """How many of a history's tokens are there, from its beginning on."""
        if key not in self._cache:
            return 0
        return self._cache.left_tokens(key) + self._uses[key].shared_tokens

    def keeps(self, key: str, for_s: float) -> bool:
        """Whether a history will be there for so long, by what the oldest there has reached."""
        if key not in self._cache:
            return False
        if self._cache.tokens < _FULL * self._capacity_tokens:
            oldest_s = -inf
        else:
            oldest_s = self._uses[next(iter(self._cache))].now_s
        return self._uses[key].now_s - oldest_s >= for_s

    def resize(self, capacity_tokens: int) -> None:
        """There is so much room from now on; what is too much goes."""
        self._capacity_tokens = capacity_tokens
        for gone in self._cache.resize(capacity_tokens):
            del self._uses[gone]

    def use(self, key: str, tokens: int, now_s: float, shared_tokens: int = 0) -> None:
        """So much of a history is there now, or as much as there was, if that is more.

        Args:
            shared_tokens: what of it others begin with, too: it is there once, and counted with
                whoever had it first.
        """
        tokens = max(tokens, self.left_tokens(key))
        shared_tokens = min(shared_tokens, tokens)
        self._uses[key] = _Use(now_s, shared_tokens)
        # Of one that is longer than the memory its beginning stays, at most.
        for gone in self._cache.use(key, min(tokens - shared_tokens, self._capacity_tokens)):
            del self._uses[gone]

    def take_over(self, uses: Iterable[tuple[str, int, float, int]]) -> None:
        """Note what was used under a table before this one, in whatever order it is told.

        Args:
            uses: arguments of `use`. What is known here of a later time stays as it is.
        """
        known = [(key, self.left_tokens(key), *self._uses[key]) for key in self._cache]
        times_s = {key: used.now_s for key, used in self._uses.items()}
        new = [use for use in uses if use[2] > times_s.get(use[0], -inf)]
        self._cache, self._uses = EngineCache(self._capacity_tokens), {}
        for key, tokens, now_s, shared_tokens in sorted(known + new, key=lambda use: use[2]):
            self.use(key, tokens, now_s, shared_tokens)

    def drop(self, key: str) -> None:
        """It was not found there."""
        self._cache.drop(key)
        self._uses.pop(key, None)
