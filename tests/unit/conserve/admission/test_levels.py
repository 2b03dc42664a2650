"""Levels: attained service decides the order, and after some time no ticket is overtaken any
more.
"""

import itertools
import random
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from conserve import identity
from conserve.admission import Levels, Queue, Ticket

FIRST_TOKENS, GROWTH, LEVELS, RISE_S = 100, 4, 3, 10.0
# Of the three levels' conversations, one each.
SERVED = (0, 100, 400)


def a_queue(limit: int = 1024) -> Queue:
    return Queue(limit, 1e9, Levels(FIRST_TOKENS, GROWTH, LEVELS, RISE_S))


def ticket_of(history_id: str, tokens: int, now_s: float, **more: Any) -> Ticket:
    return Ticket(history_id, tokens, now_s, now_s, **more)


def keys(queue: Queue, now_s: float) -> list[str]:
    return [ticket.history_id for ticket in queue.tickets(now_s)]


def by_the_rule(tickets: list[Ticket], now_s: float) -> list[str]:
    """The order within one tenant, computed from the beginning each time."""

    def place(ticket: Ticket) -> tuple[int, float, float]:
        level = sum(ticket.served_tokens >= limit for limit in (100, 400))
        left = level - int((now_s - ticket.joined_s) // RISE_S)
        aged_s = ticket.joined_s + (level + 1) * RISE_S
        return (-1, aged_s, 0.0) if left < 0 else (left, ticket.joined_s, 0.0)

    # Sorting is stable: who joined first is first.
    return [one.history_id for one in sorted(tickets, key=place)]


def test_waiting_lets_rise_and_in_the_end_nobody_overtakes() -> None:
    queue = a_queue()
    old = queue.join(ticket_of("old", 10, 0.0, served_tokens=5000))
    queue.join(ticket_of("at ten", 10, 10.0, served_tokens=150))
    assert keys(queue, 10.0) == ["old", "at ten"]
    young = queue.join(ticket_of("at fifteen", 10, 15.0))
    assert keys(queue, 19.9) == ["at fifteen", "old", "at ten"]
    # In a level who came first goes first, wherever it began.
    assert keys(queue, 20.0) == ["old", "at ten", "at fifteen"]
    assert not queue.holds_up(old, 29.9)
    assert queue.holds_up(old, 30.0)
    # Both are aged, one of them since 25 s.
    assert queue.holds_up(young, 30.0)
    assert keys(queue, 30.0) == ["at fifteen", "old", "at ten"]


def test_what_is_warm_comes_aged_and_rises_no_further() -> None:
    queue = a_queue()
    queue.join(ticket_of("old", 10, 0.0))
    queue.join(ticket_of("warm", 10, 5.0, served_tokens=5000, warm=True))
    queue.join(ticket_of("young", 10, 6.0))
    queue.join(ticket_of("warm too", 10, 12.0, warm=True))
    for now_s in (12.0, 16.0, 60.0):
        assert keys(queue, now_s) == ["warm", "old", "warm too", "young"]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["join", "leave"]),
            # Quarters of a second, whose sums are exact.
            st.integers(0, 48).map(lambda quarters: quarters / 4),
            st.sampled_from(SERVED),
            st.integers(0, 30),
        ),
        max_size=40,
    )
)
def test_the_order_is_the_rule_s_at_any_time(steps: list[tuple[str, float, int, int]]) -> None:
    queue, waiting, now_s = a_queue(), list[Ticket](), 0.0
    for number, (what, after_s, served, pick) in enumerate(steps):
        now_s += after_s
        if what == "join":
            waiting.append(queue.join(ticket_of(f"c{number}", 1, now_s, served_tokens=served)))
        elif waiting:
            queue.leave(waiting.pop(pick % len(waiting)).history_id, went=bool(pick % 2))
        assert keys(queue, now_s) == by_the_rule(waiting, now_s)
        for ticket in waiting:
            level = SERVED.index(ticket.served_tokens)
            held_up = queue.holds_up(ticket, now_s)
            assert held_up == (now_s - ticket.joined_s >= (level + 1) * RISE_S)


@dataclass
class _Run:
    """A queue before one decoder whose room comes and goes, and what happened in it."""

    queue: Queue = field(default_factory=a_queue)
    joined: dict[str, Ticket] = field(default_factory=dict)
    # Pairs in which the first went before the second while both waited.
    passed: dict[str, list[Ticket]] = field(default_factory=lambda: defaultdict(list))

    def join(self, key: str, tokens: int, served: int, now_s: float) -> None:
        self.joined[key] = self.queue.join(ticket_of(key, tokens, now_s, served_tokens=served))

    def look(self, room: int, now_s: float) -> None:
        for ticket in list(self.queue.tickets(now_s)):
            if ticket.prompt_tokens <= room:
                room -= ticket.prompt_tokens
                self.queue.leave(ticket.history_id, went=True)
                for other in self.queue.tickets(now_s):
                    self.passed[other.history_id].append(ticket)
            elif self.queue.holds_up(ticket, now_s):
                break


def aged_s(ticket: Ticket) -> float:
    return ticket.joined_s + (SERVED.index(ticket.served_tokens) + 1) * RISE_S


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 4))
def test_nobody_is_overtaken_for_longer_than_its_levels_last(seed: int, tenants: int) -> None:
    """The bounds that `Levels` states, for any arrivals and any room."""
    rng = random.Random(seed)
    run, now_s = _Run(), 0.0
    for number in range(60):
        now_s += rng.expovariate(1.0)
        tenant = f"t{rng.randrange(tenants)}" if tenants > 1 else None
        tokens, served = rng.choice([1, 3, 10]), rng.choice(SERVED)
        run.join(identity.scoped(tenant, f"c{number}"), tokens, served, now_s)
        run.look(rng.choice([0, 0, 1, 2, 5, 10]), now_s)
    for key, ticket in run.joined.items():
        own = identity.tenant_of(key)
        passed = [one for one in run.passed[key] if identity.tenant_of(one.history_id) == own]
        assert all(one.joined_s < aged_s(ticket) for one in passed)
    while len(run.queue):
        # By now all are aged, so one goes whenever there is room for the largest.
        now_s += LEVELS * RISE_S
        waited = len(run.queue)
        run.look(10, now_s)
        assert len(run.queue) < waited


def test_a_crowd_of_one_tenant_goes_before_no_other() -> None:
    queue = a_queue()
    for number in range(100):
        queue.join(ticket_of(identity.scoped("crowd", f"c{number}"), 1, 0.0))
    queue.join(ticket_of(identity.scoped("one", "c"), 1, 5.0, served_tokens=5000))
    first_two = [identity.tenant_of(key) for key in keys(queue, 5.0)[:2]]
    assert first_two == ["crowd", "one"]
    queue.leave(identity.scoped("crowd", "c0"), went=True)
    assert identity.tenant_of(keys(queue, 5.0)[0]) == "one"


def test_who_gives_up_does_not_cost_its_tenant_a_turn() -> None:
    queue = a_queue()
    for tenant, own in (("a", "1"), ("a", "2"), ("b", "1")):
        queue.join(ticket_of(identity.scoped(tenant, own), 1, 0.0))
    queue.leave(identity.scoped("a", "1"))
    assert keys(queue, 0.0)[0] == identity.scoped("a", "2")


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**9))
def test_tenants_that_wait_are_served_by_their_weights(seed: int) -> None:
    """At no time does one have more than another by a prompt of each, by what was computed."""
    rng = random.Random(seed)
    queue, numbers = a_queue(), itertools.count()
    weights = {f"t{n}": rng.choice([1, 3]) for n in range(rng.randint(2, 4))}
    served = dict.fromkeys(weights, 0)
    most = 120

    def join(tenant: str) -> None:
        key = identity.scoped(tenant, f"c{next(numbers)}")
        more = {"served_tokens": rng.choice(SERVED), "weight": weights[tenant]}
        queue.join(ticket_of(key, 1, now_s, own_tokens=rng.randint(1, 100), **more))

    now_s = 0.0
    for tenant in weights:
        for _ in range(rng.randint(1, 9)):
            join(tenant)
    for _ in range(200):
        now_s += rng.expovariate(1.0)
        ticket = next(iter(queue.tickets(now_s)))
        queue.leave(ticket.history_id, went=True)
        # Its answer, and what of the prompt was found, were not known before.
        tokens = max(1, ticket.own_tokens + rng.randint(-20, 20))
        queue.served(ticket.history_id, tokens)
        tenant = identity.tenant_of(ticket.history_id)
        assert tenant is not None
        served[tenant] += tokens
        join(tenant)
        shares = {one: served[one] / weight for one, weight in weights.items()}
        least, largest = min(shares, key=shares.__getitem__), max(shares, key=shares.__getitem__)
        assert shares[largest] - shares[least] <= most / weights[largest]


def test_a_tenant_that_asked_for_nothing_has_saved_up_little() -> None:
    queue = a_queue()
    for tenant in ("busy", "idle"):
        queue.join(ticket_of(identity.scoped(tenant, "first"), 1, 0.0))
    queue.leave(identity.scoped("idle", "first"))
    queue.leave(identity.scoped("busy", "first"), went=True)
    queue.served(identity.scoped("busy", "first"), 10**9)
    for number in range(20):
        for tenant in ("busy", "idle"):
            key = identity.scoped(tenant, f"c{number}")
            queue.join(ticket_of(key, 1, 1.0, own_tokens=8192))
    tenants = [identity.tenant_of(key) for key in keys(queue, 1.0)]
    # 65,536 tokens.
    assert tenants[:8] == ["idle"] * 8
    assert sorted(map(str, tenants[8:12])) == ["busy", "busy", "idle", "idle"]


def test_what_is_in_the_background_waits_for_all_others_and_is_aged_in_the_end() -> None:
    queue = a_queue()
    long = queue.join(ticket_of("long", 1, 0.0, background=True))
    warm = ticket_of(identity.scoped("acme", "c"), 1, 0.0, background=True, warm=True)
    queue.join(warm)
    queue.join(ticket_of("large", 1, 49.0, served_tokens=5000))
    queue.join(ticket_of("new", 1, 49.5))
    assert keys(queue, 49.9) == ["new", "large", "long", warm.history_id]
    assert not queue.holds_up(long, 49.9)
    assert keys(queue, 50.0) == ["long", warm.history_id, "new", "large"]
    assert queue.holds_up(long, 50.0)
    assert queue.holds_up(warm, 50.0)


def test_what_cannot_be_in_time_any_more_goes_before_none_that_can() -> None:
    queue = a_queue()
    queue.join(ticket_of("late", 1, 0.0, late_s=5.0, served_tokens=150))
    queue.join(ticket_of("in time", 1, 1.0, late_s=30.0, served_tokens=5000))
    queue.join(ticket_of("behind", 1, 0.0, background=True))
    queue.join(ticket_of("late behind", 1, -1.0, background=True, late_s=2.0))
    assert keys(queue, 1.0) == ["late", "in time", "late behind", "behind"]
    for now_s in (5.0, 12.0):
        assert keys(queue, now_s) == ["in time", "late", "behind", "late behind"]
    # Still, it does not wait for ever.
    assert keys(queue, 20.0) == ["late", "in time", "behind", "late behind"]
    assert keys(queue, 50.0)[2:] == ["late behind", "behind"]
