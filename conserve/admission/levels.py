"""Lets whoever has been served little go first, and nobody wait for ever."""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from conserve import identity
from conserve.admission.ticket import Ticket

# Above every level: who has waited so long that nobody overtakes any more.
_AGED = -1


class _Place(NamedTuple):
    """Compared as a tuple: in this order those of a tenant go."""

    level: int
    since_s: float
    number: int
    ticket: Ticket


class Levels:
    """Conversations by the service that they have had, in few levels; waiting lets them rise.

    Who begins to wait is on the level of what its conversation has been served (`Ticket`): level 0
    below ``first_tokens``, each further one up to ``growth`` times as much, the last one without
    end. Whoever has waited for ``rise_s`` rises by one, and from level 0 to those who are *aged*.
    The aged go first, in the order in which they became so; then level after level, on each
    whoever came first. While somebody does not fit, those behind who do may overtake, but nobody
    overtakes the aged: room is kept for them.

    So most agents, which have a few turns, are not stuck behind the few that have hundreds, as with
    attained service in Autellix' queues; and nobody starves:

    - Nobody who comes later than (level + 1) x ``rise_s`` after one goes before it.
    - From then on, whoever goes before it waits already, and is aged.

    Tenants take turns before that: first each one's first, then each one's second, and so on. When
    one of a tenant has gone, the others' turns are before its next. Both bounds then hold among a
    tenant's own; and of T tenants in line, while m of its own go before one that is aged, no more
    than (m + 1) x (T - 1) of others do.

    Joining, leaving and rising are O(log n) comparisons in a tenant's line.

    Args:
        first_tokens: from so much service on level 1 begins.
        growth: each further level begins at so many times as much.
        levels: how many there are.
        rise_s: after so long in a level one rises.

    Example:
        >>> def a_ticket(key, joined_s, served_tokens):
        ...     return Ticket(key, 100, joined_s, joined_s, 60.0, served_tokens=served_tokens)
        >>> order = Levels(rise_s=10)
        >>> order.join(a_ticket("hundred turns", 0.0, 50_000))
        >>> order.join(a_ticket("new", 5.0, 0))
        >>> [ticket.history_id for ticket in order.tickets(6.0)]
        ['new', 'hundred turns']
        >>> order.join(a_ticket("newer", 28.0, 0))
        >>> [ticket.history_id for ticket in order.tickets(29.0)]
        ['new', 'hundred turns', 'newer']
    """

    def __init__(
        self, first_tokens: int = 4096, growth: int = 4, levels: int = 4, rise_s: float = 10.0
    ) -> None:
        self._first_tokens = first_tokens
        self._growth = growth
        self._levels = levels
        self._rise_s = rise_s
        # By tenant, whose turn it is first.
        self._lines: OrderedDict[str | None, list[_Place]] = OrderedDict()
        self._places: dict[str, _Place] = {}
        # When who rises next; some of them may have left.
        self._rises: list[tuple[float, int, str]] = []
        self._numbers = count()

    def level(self, served_tokens: int) -> int:
        """The level of one who has been served so much, when it begins to wait."""
        level, below_tokens = 0, self._first_tokens
        while level < self._levels - 1 and served_tokens >= below_tokens:
            level += 1
            below_tokens *= self._growth
        return level

    def join(self, ticket: Ticket) -> None:
        """Somebody begins to wait."""
        place = _Place(
            self.level(ticket.served_tokens), ticket.joined_s, next(self._numbers), ticket
        )
        self._put(place)
        heappush(self._rises, (ticket.joined_s + self._rise_s, place.number, ticket.history_id))

    def leave(self, ticket: Ticket, *, went: bool) -> None:
        """Somebody waits no longer; if there was room for it, it is the next tenant's turn."""
        self._take(self._places[ticket.history_id])
        tenant = identity.tenant_of(ticket.history_id)
        if went and tenant in self._lines:
            self._lines.move_to_end(tenant)

    def tickets(self, now_s: float) -> Iterator[Ticket]:
        """Yield those who wait, who goes first first."""
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
        """Whether it has waited so long that nobody overtakes it any more."""
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
                # Of those the first goes who has been so for longest, whenever it came.
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
