"""A place in the queue for room, and the protocol of the queue's orders."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from conserve.histories.kinship import Opening


@dataclass(frozen=True, slots=True)
class Ticket:
    """A place in the queue.

    Attributes:
        arrived_s: when its first request came, before its prompt was counted.
        deadline_s: when it has waited for as long as allowed.
        served_tokens: what was computed before for all histories of its conversation.
    """

    history_id: str
    prompt_tokens: int
    joined_s: float
    arrived_s: float
    deadline_s: float
    opening: Opening | None = None
    served_tokens: int = 0


class LineOrder(Protocol):
    """Orders the queue, and says which tickets others may overtake."""

    def join(self, ticket: Ticket) -> None:
        """Add a ticket."""

    def leave(self, ticket: Ticket, *, went: bool) -> None:
        """Remove a ticket; ``went`` says whether it was admitted."""

    def tickets(self, now_s: float) -> Iterator[Ticket]:
        """Yield the tickets in their order. None may join or leave meanwhile."""

    def holds_up(self, ticket: Ticket, now_s: float) -> bool:
        """Return whether those behind have to wait until this one fits."""
