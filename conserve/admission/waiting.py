"""The queue of conversations that wait for a decoder with room."""

from collections.abc import Iterator

from conserve.admission.first_come import FirstCome
from conserve.admission.ticket import LineOrder, Ticket
from conserve.histories.kinship import Opening


class QueueFull(Exception):
    """The queue has no place free. ``retry_after_s`` is when to try again."""

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


class WaitingLine:
    """A bounded queue with a longest wait; by default in order of arrival."""

    def __init__(self, limit: int, timeout_s: float, order: LineOrder | None = None) -> None:
        self._limit = limit
        self._timeout_s = timeout_s
        self._order = FirstCome() if order is None else order
        # The oldest first.
        self._line: dict[str, Ticket] = {}

    def __len__(self) -> int:
        return len(self._line)

    @property
    def tokens(self) -> int:
        """Return the sum of the waiting prompts."""
        return sum(ticket.prompt_tokens for ticket in self._line.values())

    def tokens_of(self, beginning: str) -> int:
        """Return the sum of the prompts of histories whose ids have this prefix."""
        line = self._line.values()
        return sum(
            ticket.prompt_tokens for ticket in line if ticket.history_id.startswith(beginning)
        )

    def join(
        self,
        history_id: str,
        prompt_tokens: int,
        now_s: float,
        arrived_s: float | None = None,
        opening: Opening | None = None,
        served_tokens: int = 0,
    ) -> Ticket:
        """Take a place.

        Raises:
            QueueFull: no place is free.
            ValueError: it has a place already.
        """
        if history_id in self._line:
            raise ValueError(f"{history_id!r} waits already")
        if len(self._line) >= self._limit:
            raise QueueFull(self._limit, self.retry_after_s(now_s))
        arrived_s = now_s if arrived_s is None else arrived_s
        deadline_s = now_s + self._timeout_s
        ticket = Ticket(
            history_id, prompt_tokens, now_s, arrived_s, deadline_s, opening, served_tokens
        )
        self._line[history_id] = ticket
        self._order.join(ticket)
        return ticket

    def leave(self, history_id: str, *, went: bool = False) -> Ticket | None:
        """Give the place up; None if it has none. ``went`` says whether it is admitted."""
        ticket = self._line.pop(history_id, None)
        if ticket is not None:
            self._order.leave(ticket, went=went)
        return ticket

    def tickets(self, now_s: float) -> Iterator[Ticket]:
        """Yield the tickets in their order. None may join or leave meanwhile."""
        return self._order.tickets(now_s)

    def holds_up(self, ticket: Ticket, now_s: float) -> bool:
        return self._order.holds_up(ticket, now_s)

    def retry_after_s(self, now_s: float) -> int:
        """Return the time until a place is free at the latest, in whole seconds from 1 to 60."""
        oldest = next(iter(self._line.values()), None)
        wait_s = oldest.deadline_s - now_s if oldest is not None else self._timeout_s
        return max(1, min(int(wait_s) + 1, 60))
