"""The histories that are worked on (Denning's working set): what memories should hold of all."""

from heapq import heappop, heappush


class WorkingSet:
    """Histories of which a turn runs or waits, or the next one is near.

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
