"""A place in the line of those who wait for room, and what an order of the line has to say."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from conserve.histories.kinship import Opening


@dataclass(frozen=True, slots=True)
class Ticket:
    """A place in the line.

    Attributes:
        history_id: of the history that has it.
        prompt_tokens: its prompt's length.
        arrived_s: when its first request came; counting the prompt took the time since.
        deadline_s: when it has waited for as long as anybody may.
        opening: what else is known of its prompt.
        served_tokens: what its conversation has been served before, all its histories.
    """

    history_id: str
    prompt_tokens: int
    joined_s: float
    arrived_s: float
    deadline_s: float
    opening: Opening | None = None
    served_tokens: int = 0


class LineOrder(Protocol):
    """In which order those who wait go, and who may be overtaken by those behind who fit."""

    def join(self, ticket: Ticket) -> None:
        """Somebody begins to wait."""

    def leave(self, ticket: Ticket, *, went: bool) -> None:
        """Somebody waits no longer.

        Args:
            went: there was room for it; else it gave up.
        """

    def tickets(self, now_s: float) -> Iterator[Ticket]:
        """Yield those who wait, who goes first first. Nobody may join or leave meanwhile."""

    def holds_up(self, ticket: Ticket, now_s: float) -> bool:
        """Whether those behind have to wait until this one fits."""
