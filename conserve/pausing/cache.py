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
        # What each had when it was used, and has left.
        self._used: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._left_tokens = 0

    def __iter__(self) -> Iterator[str]:
        return iter(self._used)

    def left_tokens(self, history_id: str) -> int:
        """How many of a history's tokens are there yet, from its beginning on."""
        return self._used.get(history_id, (0, 0))[1]

    def use(self, history_id: str, tokens: int) -> list[str]:
        """A turn of a history begins or ends: it has so many tokens there.

        Returns:
            Those of which less than half is left by that, the longest unused first. It stays
            itself.
        """
        self._left_tokens += tokens - self.left_tokens(history_id)
        self._used[history_id] = (tokens, tokens)
        self._used.move_to_end(history_id)
        gone = []
        while self._left_tokens > self._capacity_tokens and len(self._used) > 1:
            oldest = next(iter(self._used))
            had, left = self._used[oldest]
            lost = min(left, self._left_tokens - self._capacity_tokens)
            self._left_tokens -= lost
            if had <= 2 * left and had > 2 * (left - lost):
                gone.append(oldest)
            if lost == left:
                del self._used[oldest]
            else:
                self._used[oldest] = (had, left - lost)
        return gone

    def drop(self, history_id: str) -> None:
        """The engine was seen to have nothing of this one any more."""
        self._left_tokens -= self._used.pop(history_id, (0, 0))[1]
