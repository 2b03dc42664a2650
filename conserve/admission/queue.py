"""The queue of conversations that wait for a decoder with room, and its orders."""

import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from operator import attrgetter
from typing import NamedTuple, Protocol

from conserve import identity
from conserve.histories.kinship import Opening
from conserve.pausing import LEVEL_TOKENS, Leads


@dataclass(frozen=True, slots=True)
class Ticket:
    """A place in the queue.

    Attributes:
        served_tokens: its conversation's histories'.
        own_tokens: of its prompt, what is no beginning that decoders held for others.
        warm: whether a memory has most of its prompt.
        background: whether it waits for those that are not.
        weight: its tenant's share of service, next to others'.
        late_s: from when on its turn cannot be in time any more.
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
    background: bool = False
    weight: int = 1
    late_s: float = math.inf


class QueueOrder(Protocol):
    """Orders the queue, and says which tickets others may overtake."""

    def join(self, ticket: Ticket) -> None: ...

    def leave(self, ticket: Ticket, *, went: bool) -> None:
        """Remove a ticket; ``went`` says whether it was admitted."""

    def came(self, ticket: Ticket) -> None:
        """Note that a turn has come that is bound nowhere; it may join, or find room at once."""
        return

    def served(self, history_id: str, tokens: int) -> None:
        """Note that a history's turn has ended, for which so much was computed and put out."""
        return

    def leads(self, history_id: str, tokens: int) -> Leads:
        """Return the leads of tenants over that of a prompt; none where tenants do not matter."""
        return {}

    def tickets(self, now_s: float) -> Iterator[Ticket]:
        """Yield the tickets in their order. None may join or leave meanwhile."""

    def holds_up(self, ticket: Ticket, now_s: float) -> bool:
        """Return whether those behind have to wait until this one fits."""


class FirstCome(QueueOrder):
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


# So much more than others a tenant may have that had less before: about two long first prompts.
_CREDIT_TOKENS = 65_536


class Shares:
    """Orders tenants by the service that each has had, by its weight (virtual time).

    A tenant that comes anew is put back to the most served one, but for `_CREDIT_TOKENS`, so that
    it saves up no more than that while it asks for nothing.
    """

    def __init__(self) -> None:
        self._served: dict[str | None, float] = {}
        self._weights: dict[str | None, int] = {}

    def came(self, tenant: str | None, weight: int) -> None:
        self._weights[tenant] = weight
        least = max(self._served.values(), default=0.0) - _CREDIT_TOKENS / weight
        self._served[tenant] = max(self._served.get(tenant, 0.0), least)

    def serve(self, tenant: str | None, tokens: int) -> None:
        self._served[tenant] = self.after(tenant, tokens)

    def after(self, tenant: str | None, tokens: float) -> float:
        """Return a tenant's place among others, once so much is computed for it."""
        return self._served.get(tenant, 0.0) + tokens / self._weights.get(tenant, 1)

    def leads(self, tenant: str | None, tokens: int) -> Leads:
        """Return others' leads over a tenant, where these are more than what it asks for."""
        served = self._served
        if len(served) < 2:
            return {}
        own, level = self.after(tenant, 0), max(tokens, LEVEL_TOKENS) / self._weights.get(tenant, 1)
        return {one: lead for one in served if abs(lead := served[one] - own) > level}


# Above every level: tickets that none may overtake any more.
_AGED = -1
# A background ticket is aged after as many times ``rise_s``.
_BACKGROUND_RISES = 5


class _Place(NamedTuple):
    level: int
    since_s: float
    number: int
    ticket: Ticket


class Levels(QueueOrder):
    """Orders tickets by their conversations' attained service, in few levels; waiting raises them.

    A conversation that was served less than ``first_tokens`` starts on level 0; each further level
    reaches up to ``growth`` times as far. After each ``rise_s`` a ticket rises by one level, and
    from level 0 it becomes *aged*. Aged tickets go first, by the time they became aged; then level
    after level in order of arrival. Later tickets may overtake any but the aged, for which room is
    kept. What is warm comes aged: it is soon done, and takes up a memory until then. So:

    - No ticket that comes later than (level + 1) x ``rise_s`` after another goes before it.
    - Once a ticket is aged, only aged tickets that wait already go before it.

    A *background* ticket is behind all levels until it is aged, after 5 x ``rise_s``. One that is
    late is behind all of its class until then.

    Both bounds hold within a tenant. The tenant that was served least, by its weight (`Shares`), is
    the next: while its own tickets take n tokens, those of another with the same weight take at
    most n more than that had less before, and one prompt.
    """

    def __init__(
        self, first_tokens: int = 4096, growth: int = 4, levels: int = 4, rise_s: float = 10.0
    ) -> None:
        self._first_tokens = first_tokens
        self._growth = growth
        self._levels = levels
        self._rise_s = rise_s
        self._lines: dict[str | None, list[_Place]] = {}
        self._shares = Shares()
        # What tickets that went were charged with, until their turns have ended.
        self._charged: dict[str, int] = {}
        self._places: dict[str, _Place] = {}
        # When tickets come to another level, as a heap; some of them may have left.
        self._changes: list[tuple[float, int, str, int]] = []
        self._numbers = count()

    def level(self, served_tokens: int) -> int:
        level, below_tokens = 0, self._first_tokens
        while level < self._levels - 1 and served_tokens >= below_tokens:
            level += 1
            below_tokens *= self._growth
        return level

    def came(self, ticket: Ticket) -> None:
        tenant = identity.tenant_of(ticket.history_id)
        if tenant not in self._lines:
            self._shares.came(tenant, ticket.weight)

    def join(self, ticket: Ticket) -> None:
        self.came(ticket)
        level, joined_s, number = self._first(ticket), ticket.joined_s, next(self._numbers)
        self._put(_Place(level, joined_s, number, ticket))
        if level == _AGED:
            return
        rises = _BACKGROUND_RISES if ticket.background else level + 1
        changes = [(joined_s + rises * self._rise_s, _AGED)]
        if not ticket.background:
            changes += [(joined_s + n * self._rise_s, level - n) for n in range(1, level + 1)]
        if ticket.late_s < math.inf:
            changes.append((max(joined_s, ticket.late_s), self._late(ticket)))
        for at_s, to in changes:
            heappush(self._changes, (at_s, number, ticket.history_id, to))

    def _first(self, ticket: Ticket) -> int:
        if ticket.background:
            return self._levels + 1
        return _AGED if ticket.warm else self.level(ticket.served_tokens)

    def _late(self, ticket: Ticket) -> int:
        return self._levels + 2 * ticket.background

    def leave(self, ticket: Ticket, *, went: bool) -> None:
        self._take(self._places[ticket.history_id])
        if went:
            charged = self._charged[ticket.history_id] = _charge(ticket)
            self._shares.serve(identity.tenant_of(ticket.history_id), charged)

    def served(self, history_id: str, tokens: int) -> None:
        tokens -= self._charged.pop(history_id, 0)
        self._shares.serve(identity.tenant_of(history_id), tokens)

    def leads(self, history_id: str, tokens: int) -> Leads:
        return self._shares.leads(identity.tenant_of(history_id), tokens)

    def tickets(self, now_s: float) -> Iterator[Ticket]:
        self._let_rise(now_s)
        behind = {
            tenant: bisect_left(line, self._levels + 1, key=attrgetter("level"))
            for tenant, line in self._lines.items()
        }
        yield from self._by_tenant({tenant: (0, to) for tenant, to in behind.items()})
        yield from self._by_tenant({tenant: (at, None) for tenant, at in behind.items()})

    def _by_tenant(self, parts: Mapping[str | None, tuple[int, int | None]]) -> Iterator[Ticket]:
        """Yield these parts of tenants' lines; the tenant that was served least is the next."""
        lines = {tenant: iter(self._lines[tenant][slice(*part)]) for tenant, part in parts.items()}
        if len(lines) == 1:
            yield from (place.ticket for line in lines.values() for place in line)
            return
        taken_tokens = dict.fromkeys(lines, 0)
        # Tenants that are level go in the order in which they came.
        order = [(self._shares.after(tenant, 0), n, tenant) for n, tenant in enumerate(lines)]
        heapify(order)
        while order:
            _, n, tenant = order[0]
            if (place := next(lines[tenant], None)) is None:
                heappop(order)
                continue
            yield place.ticket
            taken_tokens[tenant] += _charge(place.ticket)
            heapreplace(order, (self._shares.after(tenant, taken_tokens[tenant]), n, tenant))

    def holds_up(self, ticket: Ticket, now_s: float) -> bool:
        self._let_rise(now_s)
        return self._places[ticket.history_id].level == _AGED

    def _let_rise(self, now_s: float) -> None:
        while self._changes and self._changes[0][0] <= now_s:
            at_s, number, key, level = heappop(self._changes)
            place = self._places.get(key)
            if place is None or place.number != number or place.level == _AGED:
                continue
            if level == _AGED:
                place = place._replace(since_s=at_s)
            elif place.level == self._late(place.ticket):
                continue
            self._take(self._places[key])
            self._put(place._replace(level=level))

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


def _charge(ticket: Ticket) -> int:
    """Return what a ticket counts, until it is known what was computed for it."""
    return 1 if ticket.warm else max(1, ticket.own_tokens)


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
        order: says which go first, and whose tenants lead.
    """

    def __init__(self, limit: int, timeout_s: float, order: QueueOrder | None = None) -> None:
        self._limit = limit
        self.timeout_s = timeout_s
        self.order = FirstCome() if order is None else order
        self.served, self.tickets = self.order.served, self.order.tickets
        self.holds_up = self.order.holds_up
        # The oldest first.
        self._tickets: dict[str, Ticket] = {}

    def __len__(self) -> int:
        return len(self._tickets)

    @property
    def tokens(self) -> int:
        return sum(ticket.prompt_tokens for ticket in self._tickets.values())

    def tokens_of(self, beginning: str) -> int:
        """Return the sum of the prompts of histories whose ids have this prefix."""
        found = (one for id, one in self._tickets.items() if id.startswith(beginning))
        return sum(ticket.prompt_tokens for ticket in found)

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
        self.order.join(ticket)
        return ticket

    def leave(self, history_id: str, *, went: bool = False) -> Ticket | None:
        """Give the place up; None if it has none. ``went`` says whether it is admitted."""
        ticket = self._tickets.pop(history_id, None)
        if ticket is not None:
            self.order.leave(ticket, went=went)
        return ticket

    def retry_after_s(self, now_s: float) -> int:
        """Return the time until a place is free at the latest, in whole seconds from 1 to 60."""
        oldest = next(iter(self._tickets.values()), None)
        wait_s = oldest.deadline_s - now_s if oldest is not None else self.timeout_s
        return max(1, min(int(wait_s) + 1, 60))
