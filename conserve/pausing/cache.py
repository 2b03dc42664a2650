"""Follows what an engine's own prefix cache still has, as far as can be told from outside."""

from collections import OrderedDict
from collections.abc import Iterator


class EngineCache:
    """Histories whose KV is kept, the longest unused first.

    vLLM keeps the blocks of a request that has ended until it needs them. It takes those unused for
    longest first, and of one request the last ones first; so do LMCache's server and this. It errs
    where histories share a beginning (each counts with what it has beyond that), and where a turn
    that was cut left less than expected.
    """

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity_tokens = capacity_tokens
        self._left: OrderedDict[str, int] = OrderedDict()
        self.tokens = 0

    def __iter__(self) -> Iterator[str]:
        return iter(self._left)

    def __contains__(self, history_id: str) -> bool:
        return history_id in self._left

    def left_tokens(self, history_id: str) -> int:
        """Return how many of a history's tokens are there yet, from its beginning on."""
        return self._left.get(history_id, 0)

    def resize(self, capacity_tokens: int) -> list[str]:
        """Change the room, and return the histories of which nothing is left then."""
        self._capacity_tokens = capacity_tokens
        return self._free(0)

    def use(self, history_id: str, tokens: int) -> list[str]:
        """Note what a history has there as a turn of it begins or ends.

        Returns:
            Other histories of which nothing is left now.
        """
        left = self._left
        self.tokens += tokens - left.get(history_id, 0)
        left[history_id] = tokens
        left.move_to_end(history_id)
        return self._free(1) if self.tokens > self._capacity_tokens else []

    def drop(self, history_id: str) -> None:
        """Forget a history of which the engine was seen to have nothing."""
        self.tokens -= self._left.pop(history_id, 0)

    def _free(self, stay: int) -> list[str]:
        gone = []
        while self.tokens > self._capacity_tokens and len(self._left) > stay:
            oldest, left = next(iter(self._left.items()))
            lost = min(left, self.tokens - self._capacity_tokens)
            self.tokens -= lost
            if lost == left:
                del self._left[oldest]
                gone.append(oldest)
            else:
                self._left[oldest] = left - lost
        return gone
