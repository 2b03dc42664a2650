"""The queue of conversations that wait for a decoder with room, and its orders."""

import math
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple, Protocol

from conserve import identity
from conserve.histories.kinship import Opening


@dataclass(frozen=True, slots=True)
class Ticket:
    """A place in the queue.

    Attributes:
        served_tokens: its conversation's histories'.
        own_tokens: of its prompt, what is no beginning that decoders held for others.
        warm: whether a memory has most of its prompt.
    """

    history_id: str
    prompt_tokens: int
    joined_s: float
    arrived_s: float
    deadline_s: float = math.inf
    opening: Opening | None = None
    served_tokens: int = 0
    own_tokens: int = 0
    warm: bool = False


class QueueOrder(Protocol):
    """Orders the queue, and says which tickets others may overtake."""

    def join(self, ticket: Ticket) -> None: ...

    def leave(self, ticket: Ticket, *, went: bool) -> None:
        """Remove a ticket; ``went`` says whether it was admitted."""

    def tickets(self, now_s: float) -> Iterator[Ticket]:
        """Yield the tickets in their order. None may join or leave meanwhile."""

    def holds_up(self, ticket: Ticket, now_s: float) -> bool:
        """Return whether those behind have to wait until this one fits."""


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


# Above every level: tickets that none may overtake any more.
_AGED = -1


class _Place(NamedTuple):
    level: int
    since_s: float
    number: int
    ticket: Ticket


class Levels:
    """Orders tickets by their conversations' attained service, in few levels; waiting raises them.

    A conversation that was served less than ``first_tokens`` starts on level 0; each further level
    reaches up to ``growth`` times as far. After each ``rise_s`` a ticket rises by one level, and
    from level 0 it becomes *aged*. Aged tickets go first, by the time they became aged; then level
    after level in order of arrival. Later tickets may overtake any but the aged, for which room is
    kept. What is warm comes aged: it is soon done, and takes up a memory until then. So:

    - No ticket that comes later than (level + 1) x ``rise_s`` after another goes before it.
    - Once a ticket is aged, only aged tickets that wait already go before it.

    Tenants take turns, and both bounds hold within a tenant. With T tenants waiting, while m
    tickets of its own tenant go before an aged one, at most (m + 1) x (T - 1) of others do.
    """

    def __init__(
        self, first_tokens: int = 4096, growth: int = 4, levels: int = 4, rise_s: float = 10.0
    ) -> None:
        self._first_tokens = first_tokens
        self._growth = growth
        self._levels = levels
        self._rise_s = rise_s
        # By tenant, the one whose turn it is first.
        self._lines: OrderedDict[str | None, list[_Place]] = OrderedDict()
        self._places: dict[str, _Place] = {}
        # When tickets rise, as a heap; some of them may have left.
        self._rises: list[tuple[float, int, str]] = []
        self._numbers = count()

    def level(self, served_tokens: int) -> int:
        level, below_tokens = 0, self._first_tokens
        while level < self._levels - 1 and served_tokens >= below_tokens:
            level += 1
            below_tokens *= self._growth
        return level

    def join(self, ticket: Ticket) -> None:
        level = _AGED if ticket.warm else self.level(ticket.served_tokens)
        place = _Place(level, ticket.joined_s, next(self._numbers), ticket)
        self._put(place)
        if not ticket.warm:
            heappush(self._rises, (ticket.joined_s + self._rise_s, place.number, ticket.history_id))

    def leave(self, ticket: Ticket, *, went: bool) -> None:
        """Remove a ticket; if it was admitted, its tenant's next comes after the other tenants'."""
        self._take(self._places[ticket.history_id])
        tenant = identity.tenant_of(ticket.history_id)
        if went and tenant in self._lines:
            self._lines.move_to_end(tenant)

    def tickets(self, now_s: float) -> Iterator[Ticket]:
        self._let_rise(now_s)
        if len(self._lines) == 1:
            (line,) = self._lines.values()
            yield from (place.ticket for place in line)
            return
        for at in range(max(map(len, self._lines.values()), default=0)):
            for line in self._lines.values():
                if at < len(line):
                    yield line[at].ticket

    def holds_up(self, ticket: Ticket, now_s: float) -> bool:
        self._let_rise(now_s)
        return self._places[ticket.history_id].level == _AGED

    def _let_rise(self, now_s: float) -> None:
        while self._rises and self._rises[0][0] <= now_s:
            at_s, number, key = heappop(self._rises)
            place = self._places.get(key)
            if place is None or place.number != number:
                continue
            self._take(place)
            if place.level == 0:
                self._put(place._replace(level=_AGED, since_s=at_s))
                continue
            self._put(place._replace(level=place.level - 1))
            heappush(self._rises, (at_s + self._rise_s, number, key))

    def _put(self, place: _Place) -> None:
        tenant = identity.tenant_of(place.ticket.history_id)
        insort(self._lines.setdefault(tenant, []), place)
        self._places[place.ticket.history_id] = place

    def _take(self, place: _Place) -> None:
        del self._places[place.ticket.history_id]
        tenant = identity.tenant_of(place.ticket.history_id)
        line = self._lines[tenant]
        del line[bisect_left(line, place)]
        if not line:
            del self._lines[tenant]


class QueueFull(Exception):
    """The queue has no place free. ``retry_after_s`` is when to try again."""

    def __init__(self, limit: int, retry_after_s: int) -> None:
        super().__init__(
            f"no decoder has room, and the queue is full (at most {limit} conversations); try "
            f"again in {retry_after_s} s"
        )
        self.limit = limit
        self.retry_after_s = retry_after_s


class Queue:
    """A bounded queue with a longest wait; by default in order of arrival.

    Attributes:
        timeout_s: the longest wait of those that join from now on.
    """

    def __init__(self, limit: int, timeout_s: float, order: QueueOrder | None = None) -> None:
        self._limit = limit
        self.timeout_s = timeout_s
        self._order = FirstCome() if order is None else order
        # The oldest first.
        self._tickets: dict[str, Ticket] = {}

    def __len__(self) -> int:
        return len(self._tickets)

    @property
    def tokens(self) -> int:
        return sum(ticket.prompt_tokens for ticket in self._tickets.values())

    def tokens_of(self, beginning: str) -> int:
        """Return the sum of the prompts of histories whose ids have this prefix."""
        tickets = self._tickets.values()
        return sum(
            ticket.prompt_tokens for ticket in tickets if ticket.history_id.startswith(beginning)
        )

    def join(self, ticket: Ticket) -> Ticket:
        """Take a place; returns the ticket with its deadline.

        Raises:
            QueueFull: no place is free.
            ValueError: it has a place already.
        """
        if ticket.history_id in self._tickets:
            raise ValueError(f"{ticket.history_id!r} waits already")
        if len(self._tickets) >= self._limit:
            raise QueueFull(self._limit, self.retry_after_s(ticket.joined_s))
        ticket = replace(ticket, deadline_s=ticket.joined_s + self.timeout_s)
        self._tickets[ticket.history_id] = ticket
        self._order.join(ticket)
        return ticket

    def leave(self, history_id: str, *, went: bool = False) -> Ticket | None:
        """Give the place up; None if it has none. ``went`` says whether it is admitted."""
        ticket = self._tickets.pop(history_id, None)
        if ticket is not None:
            self._order.leave(ticket, went=went)
        return ticket

    def tickets(self, now_s: float) -> Iterator[Ticket]:
        return self._order.tickets(now_s)

    def holds_up(self, ticket: Ticket, now_s: float) -> bool:
        return self._order.holds_up(ticket, now_s)

    def retry_after_s(self, now_s: float) -> int:
        """Return the time until a place is free at the latest, in whole seconds from 1 to 60."""
        oldest = next(iter(self._tickets.values()), None)
        wait_s = oldest.deadline_s - now_s if oldest is not None else self.timeout_s
        return max(1, min(int(wait_s) + 1, 60))
