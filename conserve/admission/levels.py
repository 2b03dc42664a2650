"""Orders waiting conversations by how little service they have had, without starving any."""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from conserve import identity
from conserve.admission.ticket import Ticket

# Above every level: tickets that none may overtake any more.
_AGED = -1


class _Place(NamedTuple):
    """A ticket's place in its tenant's queue; the tuples sort in the queue's order."""

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
    kept. So:

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
        place = _Place(
            self.level(ticket.served_tokens), ticket.joined_s, next(self._numbers), ticket
        )
        self._put(place)
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
        """Return whether it is aged."""
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
