"""First come, first served."""

from collections.abc import Iterator

from conserve.admission.ticket import Ticket


class FirstCome:
    """Lets whoever came first go first; nobody overtakes, however small (the ConServe paper's
    line).

    Example:
        >>> order = FirstCome()
        >>> for key, tokens in (("long", 9000), ("short", 10)):
        ...     order.join(Ticket(key, tokens, joined_s=0.0, arrived_s=0.0, deadline_s=60.0))
        >>> [ticket.history_id for ticket in order.tickets(5.0)]
        ['long', 'short']
    """

    def __init__(self) -> None:
        self._tickets: dict[str, Ticket] = {}

    def join(self, ticket: Ticket) -> None:
        """Somebody begins to wait."""
        self._tickets[ticket.history_id] = ticket

    def leave(self, ticket: Ticket, *, went: bool) -> None:
        """Somebody waits no longer."""
        del self._tickets[ticket.history_id]

    def tickets(self, now_s: float) -> Iterator[Ticket]:
        """Yield those who wait, who goes first first."""
        return iter(self._tickets.values())

    def holds_up(self, ticket: Ticket, now_s: float) -> bool:
        """Everybody holds up those behind."""
        return True
