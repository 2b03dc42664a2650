"""The line of conversations that wait for a decoder with room: first in, first out, bounded."""

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

from conserve.histories.kinship import Opening


class QueueFull(Exception):
    """As many conversations wait already as may. ``retry_after_s`` is when to try again."""

    def __init__(self, limit: int, retry_after_s: int) -> None:
        if limit == 0:
            why = "no decoder has room, and none may wait for it"
        elif limit == 1:
            why = "1 conversation waits for room already"
        else:
            why = f"{limit} conversations wait for room already"
        super().__init__(f"{why}; try again in {retry_after_s} s")
        self.limit = limit
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Ticket:
    """A place in the line.

    Attributes:
        key: the id of the conversation that has it.
        tokens: its prompt's length.
        arrived_s: when its first request came; counting the prompt took the time since.
        deadline_s: when it has waited for as long as anybody may.
        opening: what else is known of its prompt.
    """

    key: str
    tokens: int
    joined_s: float
    arrived_s: float
    deadline_s: float
    opening: Opening | None = None


class WaitingLine:
    """A bounded line with a longest wait.

    The head waits until it can go; nobody overtakes it, however small, so that a long first
    turn is never starved by short ones.

    Args:
        limit: places in the line; 0 means that nobody may wait.
        timeout_s: the longest wait.
    """

    def __init__(self, limit: int, timeout_s: float) -> None:
        self._limit = limit
        self._timeout_s = timeout_s
        self._line: OrderedDict[str, Ticket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._line)

    @property
    def tokens(self) -> int:
        """What the prompts of everybody in the line add up to."""
        return sum(ticket.tokens for ticket in self._line.values())

    def keys(self) -> Collection[str]:
        """Who waits, in order."""
        return self._line.keys()

    def tokens_of(self, beginning: str) -> int:
        """What the prompts of those whose keys begin so add up to."""
        line = self._line.values()
        return sum(ticket.tokens for ticket in line if ticket.key.startswith(beginning))

    def join(
        self,
        key: str,
        tokens: int,
        now_s: float,
        arrived_s: float | None = None,
        opening: Opening | None = None,
    ) -> Ticket:
        """Take the last place.

        Args:
            arrived_s: when its first request came, if that was before now.

        Raises:
            QueueFull: no place is free.
            ValueError: the key has a place already.
        """
        if key in self._line:
            raise ValueError(f"{key!r} waits already")
        if len(self._line) >= self._limit:
            raise QueueFull(self._limit, self.retry_after_s(now_s))
        arrived_s = now_s if arrived_s is None else arrived_s
        ticket = Ticket(key, tokens, now_s, arrived_s, now_s + self._timeout_s, opening)
        self._line[key] = ticket
        return ticket

    def leave(self, key: str) -> Ticket | None:
        """Give the place up; None if the key has none."""
        return self._line.pop(key, None)

    def head(self) -> Ticket | None:
        """The place that is next; None if the line is empty."""
        return next(iter(self._line.values()), None)

    def retry_after_s(self, now_s: float) -> int:
        """When a place is free at the latest, in whole seconds, at least 1."""
        head = self.head()
        wait_s = head.deadline_s - now_s if head is not None else self._timeout_s
        return max(1, min(int(wait_s) + 1, 60))
