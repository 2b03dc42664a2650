"""What an engine's own prefix cache still has, as far as can be told from outside."""

from collections import OrderedDict
from collections.abc import Iterator


class EngineCache:
    """Histories that an engine has KV of, the longest unused first.

    vLLM keeps the blocks of a request that has ended until it needs them, and takes those unused
    for longest first, whether their conversation lives or not. So does this: of histories that were
    used after one another it keeps the newest whose tokens fit. It errs where histories share a
    beginning (each is counted with what it has beyond that), and where a turn that was cut left
    less than is thought.

    Args:
        capacity_tokens: of the engine's KV space.
    """

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity_tokens = capacity_tokens
        self._used: OrderedDict[str, int] = OrderedDict()
        self._tokens = 0

    def __contains__(self, history_id: str) -> bool:
        return history_id in self._used

    def __iter__(self) -> Iterator[str]:
        return iter(self._used)

    def use(self, history_id: str, tokens: int) -> list[str]:
        """A turn of a history begins or ends: it has so many tokens there.

        Returns:
            Those that had to go for it, the longest unused first. It stays itself.
        """
        self._tokens += tokens - self._used.get(history_id, 0)
        self._used[history_id] = tokens
        self._used.move_to_end(history_id)
        gone = []
        while self._tokens > self._capacity_tokens and len(self._used) > 1:
            oldest, its_tokens = self._used.popitem(last=False)
            self._tokens -= its_tokens
            gone.append(oldest)
        return gone

    def drop(self, history_id: str) -> None:
        """The engine has said that it has nothing of this one any more."""
        self._tokens -= self._used.pop(history_id, 0)
