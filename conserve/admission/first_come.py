"""First come, first served."""

from collections.abc import Iterator

from conserve.admission.ticket import Ticket


class FirstCome:
    """Serves tickets in order of arrival; none overtakes (the ConServe paper's queue)."""

    def __init__(self) -> None:
        self._tickets: dict[str, Ticket] = {}

    def join(self, ticket: Ticket) -> None:
        self._tickets[ticket.history_id] = ticket

    def leave(self, ticket: Ticket, *, went: bool) -> None:
        del self._tickets[ticket.history_id]

    def tickets(self, now_s: float) -> Iterator[Ticket]:
        return iter(self._tickets.values())

    def holds_up(self, ticket: Ticket, now_s: float) -> bool:
        return True
