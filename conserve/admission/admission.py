"""Binds conversations to decoders as they come, or when there is room for them.

A `Window` also limits how many histories are active, by the pressure on engines and on tools'
machine."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import inf
from operator import attrgetter
from typing import Literal, get_args

from conserve import identity
from conserve.admission.queue import Queue, QueueOrder, Ticket
from conserve.conversations import ConversationTable
from conserve.histories.kinship import Opening
from conserve.history import History
from conserve.pausing import patience_s
from conserve.placement import Placement
from conserve.turn import TurnKey

# Bounds of `Pressure.cpu`: above the first it counts as high, below the second as low.
_CPU_HIGH, _CPU_LOW = 0.9, 0.7
# The same of `Pressure.tools`: tools take twice as long as usual, and a third longer.
_TOOLS_HIGH, _TOOLS_LOW = 0.5, 0.25


@dataclass(slots=True)
class _Overload:
    """A signal with hysteresis: on above one bound for long enough, off below another."""

    high: float
    low: float
    persists_s: float
    on: bool = False
    slack: bool = True
    _high_since_s: float = inf

    def observe(self, now_s: float, value: float) -> None:
        self.slack = value < self.low
        if value < self.high:
            self._high_since_s = inf
            self.on = self.on and not self.slack
            return
        self._high_since_s = min(self._high_since_s, now_s)
        self.on = self.on or now_s - self._high_since_s >= self.persists_s


@dataclass(frozen=True, slots=True)
class Pressure:
    """The pressures on memories and on tools' machine, from 0 to 1.

    Attributes:
        kv: of the tokens that prompts should have found cached, the share computed again.
        cpu: of the machine that tools run on; 0 without one.
        tools: of tools' times, the share that they take longer than usual (`ToolTimes`).
    """

    kv: float = 0.0
    cpu: float = 0.0
    tools: float = 0.0


@dataclass(eq=False)
class Window:
    """The most histories that may be active: W = min(W_adm, W_cpu), or no bound.

    W_adm follows additive increase and multiplicative decrease (MARS, algorithm 1), but has no
    bound before the first overload, nor once it has been twice the active histories for
    ``forget_s``. During an overload, W_cpu would bring ``Pressure.cpu`` and ``Pressure.tools`` to
    their bounds if they were proportional to the active histories. An overload begins when one of
    them has been high for ``persists_s``, and ends when it is low. KV is left to the working set
    (`conserve.pausing.cache`).
    """

    least: int = 2
    grow: float = 1.0
    shrink: float = 0.7
    interval_s: float = 10.0
    persists_s: float = 30.0
    forget_s: float = 60.0
    limit: float = inf
    pressure: Pressure = Pressure()
    _observed_s: float = -inf
    _admitted: float = inf
    _wide_since_s: float = inf

    def __post_init__(self) -> None:
        self._cpu = _Overload(_CPU_HIGH, _CPU_LOW, self.persists_s)
        self._tools = _Overload(_TOOLS_HIGH, _TOOLS_LOW, self.persists_s)

    def is_due(self, now_s: float) -> bool:
        return now_s - self._observed_s >= self.interval_s

    def observe(self, now_s: float, active: int, pressure: Pressure) -> None:
        if not self.is_due(now_s):
            return
        self._observed_s = now_s
        self.pressure = pressure
        self._cpu.observe(now_s, pressure.cpu)
        self._tools.observe(now_s, pressure.tools)
        if self._is_overload():
            self._admitted = max(self.least, self.shrink * min(self._admitted, active))
        elif self._cpu.slack:
            # Tools' times vary: while they are no overload, they do not hold it back.
            self._admitted += self.grow
        self._forget(now_s, active)
        cpu = active * _CPU_HIGH / pressure.cpu if self._cpu.on else inf
        # Tools would take their usual time with 1 - pressure of the active histories.
        tools = active * (1 - pressure.tools) / (1 - _TOOLS_HIGH) if self._tools.on else inf
        limit = min(self._admitted, cpu, tools)
        self.limit = limit if limit == inf else max(self.least, math.floor(limit))

    def _is_overload(self) -> bool:
        return self._cpu.on or self._tools.on

    def _forget(self, now_s: float, active: int) -> None:
        if self._admitted < 2 * active or self._is_overload():
            self._wide_since_s = inf
            return
        self._wide_since_s = min(self._wide_since_s, now_s)
        if now_s - self._wide_since_s >= self.forget_s:
            self._admitted = inf


def attained_service(histories: Iterable[History]) -> int:
    """Return the tokens computed for a conversation, each once (as in Autellix).

    What is computed again after its room was given away does not count: it would send a paused
    conversation to the end of the queue, to be paused again.
    """
    served = 0
    for one in histories:
        last = one.last_turn
        if last is not None:
            served += max(0, last.prompt_tokens + last.output_tokens - one.shared_tokens)
    return served


# Trying a ticket may look at all idle histories, so at most this many are tried at a time.
_TRIED = 8
# While decoders hold a smaller share of their KV than this, none is evicted for want of room: what
# is computed again was lost with a decoder, say, or was no whole block.
_PRESSED = 0.5
# How often what waits is touched in host memory, where other KV comes meanwhile.
_TOUCH_S = 5.0

Why = Literal["room", "window", "order"]
"""Why a ticket waits: no decoder has ``room``, the ``window`` or the working set is full, or the
``order`` has others first."""
WHYS: tuple[Why, ...] = get_args(Why)


@dataclass(frozen=True, slots=True)
class Admitted:
    """A conversation that goes to a decoder, where its turn has begun.

    Attributes:
        newly_bound: False if its decoder was taken for lost and is back with its KV.
        moved: whether it was bound to another decoder before, as far as is known.
    """

    history: History
    turn: TurnKey
    prompt_tokens: int
    placement: Placement
    newly_bound: bool = True
    known: bool = False
    moved: bool = False


class Admission:
    """Binds conversations to decoders, and queues those for which there is no room.

    The caller calls `admit` whenever room may have come free, and `leave` when a conversation has
    waited for ``timeout_s``.

    A prompt that no memory has most of waits, too, until the working set has room for it
    (`Memory.free_tokens`): more than memories hold would be evicted, and computed, again and again.
    It does not wait for that while no turn runs, nor after `patience_s` if its history has begun
    before.

    Args:
        order: of the queue; by default `FirstCome`.
        window: how many histories may be active; None means as many as there is room for. A
            conversation that has waited for `patience_s` passes it.
    """

    def __init__(
        self,
        table: ConversationTable,
        limit: int,
        timeout_s: float,
        order: QueueOrder | None = None,
        window: Window | None = None,
    ) -> None:
        self._table = table
        self.queue = Queue(limit, timeout_s, order)
        table.leads = self.queue.order.leads
        self.window = window
        self._counted = (0, 0)
        self._touched_s = -_TOUCH_S

    def observe(self, now_s: float, cpu_pressure: float = 0.0) -> bool:
        """Update the window, if it is due, and return whether it has changed; then call `admit`."""
        memory = self._table.memory
        if memory is not None:
            memory.working.advance(now_s)
            if now_s - self._touched_s >= _TOUCH_S:
                self._touched_s = now_s
                memory.touch((one.history_id for one in self.queue.tickets(now_s)), now_s)
        window = self.window
        if window is None or not window.is_due(now_s):
            return False
        table = self._table
        expected = table.expected_cached_tokens + table.recomputed_tokens
        again = table.missing_cached_tokens + table.recomputed_tokens
        before, self._counted = self._counted, (expected, again)
        kv = (again - before[1]) / max(1, expected - before[0])
        decoders = table.decoders.values()
        capacity_tokens = sum(one.capacity_tokens for one in decoders)
        if sum(one.held_tokens for one in decoders) <= _PRESSED * capacity_tokens:
            kv = 0.0
        was = window.limit
        tools = table.tools.times.pressure(now_s)
        window.observe(now_s, table.active(now_s), Pressure(kv, cpu_pressure, tools))
        return window.limit != was

    def enter(
        self,
        history_id: str,
        prompt_tokens: int,
        now_s: float,
        arrived_s: float | None = None,
        opening: Opening | None = None,
        weight: int = 1,
    ) -> Admitted | Ticket:
        """Bind a conversation that is bound nowhere, or queue it; ``weight`` is its tenant's.

        Raises:
            QueueFull: neither a decoder nor the queue has room.
            ValueError: the conversation waits already.
        """
        arrived_s = now_s if arrived_s is None else arrived_s
        # While it waits for room, its tool does not run.
        self._table.tools.turn_came(history_id, arrived_s)
        memory = self._table.memory
        warm = self._is_warm(history_id, prompt_tokens)
        own_tokens = prompt_tokens - (0 if opening is None else self._table.held(opening))
        hints = None if opening is None else opening.hints
        ticket = Ticket(
            history_id, prompt_tokens, now_s, arrived_s, opening=opening,
            own_tokens=own_tokens, warm=warm, weight=weight,
            background=opening is not None and opening.background,
            late_s=arrived_s + (inf if hints is None else hints.due_in_s),
        )  # fmt: skip
        self._table.usage.of(history_id).weight = weight
        self.queue.order.came(ticket)
        if not self.queue and self._has_slot(ticket, now_s, self._free_tokens(now_s)):
            admitted = self._bind(ticket, now_s)
            if admitted is not None:
                return admitted
        histories = self._table.histories(identity.conversation_of(history_id))
        others_wait = bool(self.queue)
        ticket = self.queue.join(replace(ticket, served_tokens=attained_service(histories)))
        if memory is not None and warm:
            memory.working.add(history_id, own_tokens)
        # The tickets before it were tried when room last came free, and did not fit.
        if others_wait and any(one is ticket for one in self._candidates(now_s)):
            return self._admit_one(ticket, now_s) or ticket
        return ticket

    def admit(self, now_s: float, rested: str | None = None) -> list[Admitted]:
        """Bind those for which there is room; ``rested``: a history whose turn has just ended."""
        admitted: list[Admitted] = []
        tried: set[str] = set()
        while (one := self._next(now_s, tried)) is not None:
            admitted.append(one)
        if rested is not None and self.queue and self._gives_way(rested, now_s):
            admitted += self.admit(now_s)
        return admitted

    def _gives_way(self, history_id: str, now_s: float) -> bool:
        """Pause a history whose turn has ended, if a less served tenant's turn lacks its place.

        If its next turn comes at once, it is idle only now.
        """
        history, memory = self._table.get(history_id), self._table.memory
        if memory is None or history is None or history.running:
            return False
        home, ahead = self._lacks(next(self.queue.tickets(now_s)), now_s)
        gives_way = history.home == home and identity.tenant_of(history_id) in ahead
        if gives_way:
            memory.pause(history, "room")
        return gives_way

    def _ahead(self, ticket: Ticket) -> set[str | None]:
        leads = self.queue.order.leads(ticket.history_id, ticket.prompt_tokens)
        return {one for one, lead in leads.items() if lead > 0}

    def _lacks(self, ticket: Ticket, now_s: float) -> tuple[str | None, set[str | None]]:
        """Return where a turn lacks what tenants ahead of its own hold, and these tenants."""
        ahead, table = self._ahead(ticket), self._table
        if not ahead:
            return None, ahead
        homes = table.policy.homes(table.accepting_decoders, table.accepting_prefillers, now_s)
        home = max(homes, key=attrgetter("free_tokens"), default=None)
        held_tokens = sum(table.usage.tenant(one or "").held_tokens for one in ahead)
        if home is None or ticket.prompt_tokens > home.free_tokens + held_tokens:
            return None, set()
        return home.id, ahead

    def leave(self, history_id: str) -> Ticket | None:
        """Give up a place; None if it has none. Others may fit then, so call `admit`."""
        ticket = self.queue.leave(history_id)
        if ticket is not None and self._table.memory is not None:
            self._table.memory.working.remove(history_id)
        return ticket

    def waiting(self, now_s: float) -> Iterator[tuple[Ticket, Why]]:
        tried = {one.history_id for one in self._candidates(now_s)}
        free_tokens = self._free_tokens(now_s)
        for ticket in self.queue.tickets(now_s):
            if ticket.history_id in tried:
                yield ticket, "room"
            else:
                yield ticket, "order" if self._has_slot(ticket, now_s, free_tokens) else "window"

    def ahead(self, history_id: str, now_s: float) -> tuple[int, Why]:
        """Return how many tickets are ahead of a waiting one (else KeyError), and why it waits."""
        for ahead, (ticket, why) in enumerate(self.waiting(now_s)):
            if ticket.history_id == history_id:
                return ahead, why
        raise KeyError(history_id)

    def _candidates(self, now_s: float) -> list[Ticket]:
        candidates: list[Ticket] = []
        free_tokens = self._free_tokens(now_s)
        ahead: set[str | None] = set()
        for n, ticket in enumerate(self.queue.tickets(now_s)):
            # A working set full of others' histories does not keep a less served tenant out.
            free = inf if not n and self._ahead(ticket) else free_tokens
            if not self._has_slot(ticket, now_s, free):
                continue
            # What comes free is kept for the first, until it is enough.
            if identity.tenant_of(ticket.history_id) in ahead:
                break
            if not candidates:
                _, ahead = self._lacks(ticket, now_s)
            candidates.append(ticket)
            if len(candidates) == _TRIED or self.queue.holds_up(ticket, now_s):
                break
        return candidates

    def _next(self, now_s: float, tried: set[str]) -> Admitted | None:
        for ticket in self._candidates(now_s):
            if ticket.history_id not in tried:
                tried.add(ticket.history_id)
                if (admitted := self._admit_one(ticket, now_s)) is not None:
                    return admitted
        return None

    def _admit_one(self, ticket: Ticket, now_s: float) -> Admitted | None:
        admitted = self._bind(ticket, now_s)
        if admitted is not None:
            self.queue.leave(ticket.history_id, went=True)
        return admitted

    def _free_tokens(self, now_s: float) -> float:
        memory = self._table.memory
        # While no turn runs, to compute what is evicted again takes no other turn's time.
        if memory is None or not self._table.reasoning:
            return inf
        return memory.free_tokens(now_s)

    def _has_slot(self, ticket: Ticket, now_s: float, free_tokens: float) -> bool:
        late = now_s - ticket.joined_s >= patience_s(self.queue.timeout_s)
        passes = ticket.own_tokens <= free_tokens or (late and ticket.history_id in self._table)
        # Its KV may have been evicted since it came.
        if not (passes or (ticket.warm and self._is_warm(ticket.history_id, ticket.prompt_tokens))):
            return False
        return late or self.window is None or self._table.active(now_s) < self.window.limit

    def _is_warm(self, history_id: str, prompt_tokens: int) -> bool:
        memory = self._table.memory
        return memory is not None and memory.is_warm(history_id, prompt_tokens)

    def _bind(self, ticket: Ticket, now_s: float) -> Admitted | None:
        history_id, tokens = ticket.history_id, ticket.prompt_tokens
        known = self._table.begin(history_id, now_s)
        if known is not None and known.home is not None:
            where = Placement(known.home, None)
            return Admitted(known, known.newest_turn, tokens, where, newly_bound=False)
        before = self._table.get(history_id)
        moves = 0 if before is None else before.moves
        placement = self._table.bind(history_id, tokens, now_s, ticket.arrived_s, ticket.opening)
        if placement is None:
            return None
        history = self._table.get(history_id)
        assert history is not None
        turn, moved = history.newest_turn, history.moves > moves
        return Admitted(history, turn, tokens, placement, known=before is not None, moved=moved)
