"""What an engine's own prefix cache still has, as far as can be told from outside."""

from collections import OrderedDict
from collections.abc import Iterator


class EngineCache:
    """Histories that an engine has KV of, the longest unused first.

    vLLM keeps the blocks of a request that has ended until it needs them, and takes those unused
    for longest first, of one request the last ones first, whether its conversation lives or not. So
    does this: a history's beginning stays longest. It errs where histories share a beginning (each
    is counted with what it has beyond that), and where a turn that was cut left less than is
    thought.

    Args:
        capacity_tokens: of the engine's KV space.
    """

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity_tokens = capacity_tokens
        self._left: OrderedDict[str, int] = OrderedDict()
        self._tokens = 0

    def __iter__(self) -> Iterator[str]:
        return iter(self._left)

    def __contains__(self, history_id: str) -> bool:
        return history_id in self._left

    def left_tokens(self, history_id: str) -> int:
        """How many of a history's tokens are there yet, from its beginning on."""
        return self._left.get(history_id, 0)

    def use(self, history_id: str, tokens: int) -> list[str]:
        """A turn of a history begins or ends: it has so many tokens there.

        Returns:
            Those of which nothing is left by that. It stays itself.
        """
        left = self._left
        self._tokens += tokens - left.get(history_id, 0)
        left[history_id] = tokens
        left.move_to_end(history_id)
        return self._free() if self._tokens > self._capacity_tokens else []

    def drop(self, history_id: str) -> None:
        """The engine was seen to have nothing of this one any more."""
        self._tokens -= self._left.pop(history_id, 0)

    def _free(self) -> list[str]:
        gone = []
        while self._tokens > self._capacity_tokens and len(self._left) > 1:
            oldest, left = next(iter(self._left.items()))
            lost = min(left, self._tokens - self._capacity_tokens)
            self._tokens -= lost
            if lost == left:
                del self._left[oldest]
                gone.append(oldest)
            else:
                self._left[oldest] = left - lost
        return gone
