"""Keeps turns whose conversations are bound nowhere yet, within their tenants' limits."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from conserve import identity
from conserve.admission import Admission, Admitted, WaitingLine
from conserve.clock import unix_s
from conserve.conversations import ConversationTable
from conserve.history import History
from conserve.tenants.limits import Over
from deployments.messages import TurnTenant
from deployments.table.accounts import Accounts
from deployments.table.registry import Registry


@dataclass(slots=True, eq=False)
class PendingTurn:
    """A turn whose conversation is bound nowhere, until it is bound or given up.

    It is made by `TableService.begin`, or by `place` where that knows nothing of the turn.

    Attributes:
        router_id: the router that asked first; if it dies, the turn is given up.
        claim: tells it from other turns of the conversation, to whoever may give it up.
        settled: done once it is bound or given up; other turns of the conversation wait for that.
        arrived_s: when the conversation's first request came, in Unix time.
        chat: whether it has messages; False: it is a completion's.
        granted: None unless `place` waits for room; done when there is room, cancelled when the
            turn is given up.
        given_up: too late for that: there was room, and nobody wants it any more.
    """

    history_id: str
    router_id: str
    claim: int
    settled: asyncio.Future[None]
    chat: bool = False
    arrived_s: float = 0.0
    granted: asyncio.Future[Admitted] | None = None
    given_up: bool = False

    @property
    def waits(self) -> bool:
        """Whether `place` waits for room: in line, or just out of it and not resumed yet."""
        return self.granted is not None

    @property
    def has_room(self) -> bool:
        """Whether it is bound already, and `place` only has to notice."""
        granted = self.granted
        return granted is not None and granted.done() and not granted.cancelled()

    def settle(self) -> None:
        """Note that the conversation is bound or given up."""
        if not self.settled.done():
            self.settled.set_result(None)


# When to try again where nobody knows: turns end soon, conversations do not.
_TURN_S, _CONVERSATION_S = 1, 10


@dataclass(eq=False)
class TenantGate:
    """Says whether a turn would break a limit of its tenant; nothing is counted by asking.

    A turn counts from `arriving` to its end: while it waits for another of its conversation, then
    as a pending one, then as one that runs. At each moment it is one of the three.
    """

    table: ConversationTable
    line: WaitingLine
    _arriving: dict[str, int] = field(default_factory=dict)
    _pending: dict[str, set[PendingTurn]] = field(default_factory=dict)

    # --- what is told ------------------------------------------------------------------------

    @contextlib.contextmanager
    def arriving(self, tenant: TurnTenant | None) -> Iterator[None]:
        """Count a turn that is neither pending nor running yet."""
        if tenant is None:
            yield
            return
        self._arriving[tenant.name] = self._arriving.get(tenant.name, 0) + 1
        try:
            yield
        finally:
            self._arriving[tenant.name] -= 1

    def pends(self, pending: PendingTurn) -> None:
        """Count a turn whose conversation is to be bound."""
        name = identity.tenant_of(pending.history_id)
        if name is not None:
            self._pending.setdefault(name, set()).add(pending)

    def settled(self, pending: PendingTurn) -> None:
        """Count it no longer: it runs, or was given up."""
        name = identity.tenant_of(pending.history_id)
        if name is not None:
            self._pending.get(name, set()).discard(pending)

    # --- what can be asked -------------------------------------------------------------------

    def turn_over(self, tenant: TurnTenant | None) -> Over | None:
        """The limit that one more turn would break, whatever its conversation is."""
        if tenant is None or tenant.limits.turns is None:
            return None
        turns = self.table.usage.tenant(tenant.name).turns
        turns += self._arriving.get(tenant.name, 0) + len(self._unbound(tenant.name))
        if turns < tenant.limits.turns:
            return None
        return Over("turns", tenant.limits.turns, _TURN_S)

    def conversation_over(
        self, tenant: TurnTenant | None, history_id: str, now_s: float
    ) -> Over | None:
        """The limit that a turn of this history would break.

        Histories count as conversations: else one name would do for any number.
        """
        if tenant is None:
            return None
        limits, usage = tenant.limits, self.table.usage.tenant(tenant.name)
        if limits.held_tokens is not None and usage.held_tokens >= limits.held_tokens:
            return Over("held_tokens", limits.held_tokens, _CONVERSATION_S)
        if limits.conversations is None and limits.new_per_minute is None:
            return None
        unbound = self._unbound(tenant.name)
        new = {one.history_id for one in unbound if one.history_id not in self.table}
        if history_id in self.table or history_id in new:
            return None
        if limits.conversations is not None and (
            usage.histories + len(new) >= limits.conversations
        ):
            return Over("conversations", limits.conversations, _CONVERSATION_S)
        if limits.new_per_minute is not None and (
            usage.begun_lately(now_s) + len(new) >= limits.new_per_minute
        ):
            return Over("new_per_minute", limits.new_per_minute, usage.fewer_in_s(now_s))
        return None

    def binding_over(self, tenant: TurnTenant | None, prompt_tokens: int) -> Over | None:
        """The limit that binding a conversation with so many tokens would break."""
        if tenant is None or tenant.limits.held_tokens is None:
            return None
        allowed = tenant.limits.held_tokens
        if prompt_tokens > allowed:
            return Over("held_tokens", allowed, _CONVERSATION_S, never=True)
        if self._tokens(tenant.name) + prompt_tokens > allowed:
            return Over("held_tokens", allowed, _CONVERSATION_S)
        return None

    # --- inside ------------------------------------------------------------------------------

    def _unbound(self, name: str) -> list[PendingTurn]:
        return [one for one in self._pending.get(name, ()) if not one.has_room]

    def _tokens(self, name: str) -> int:
        """Held, and asked for by those in line."""
        beginning = identity.scoped(name, "")
        waiting = self.line.tokens_of(beginning) if self.line else 0
        return self.table.usage.tenant(name).held_tokens + waiting


@dataclass(eq=False)
class Room:
    """Admits pending turns as room comes free, and says what made room.

    Attributes:
        gate: counts pending turns, too.
        pending: by the history; one each.
    """

    table: ConversationTable
    admission: Admission
    registry: Registry
    accounts: Accounts
    gate: TenantGate
    pending: dict[str, PendingTurn] = field(default_factory=dict)
    # The clock is above all numbers of a predecessor, of which nothing is kept.
    _claims: Iterator[int] = field(
        default_factory=lambda: itertools.count(time.time_ns() // 1_000_000)
    )

    # --- pending turns -----------------------------------------------------------------------

    def new_claim(self) -> int:
        """A number that no other turn and no other history has got."""
        return next(self._claims)

    def pend(
        self, history_id: str, router_id: str, chat: bool, claim: int | None = None
    ) -> PendingTurn:
        """A turn is to be placed; see `PendingTurn`.

        Args:
            claim: None: a new one.
        """
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if claim is None:
            claim = self.new_claim()
        pending = PendingTurn(history_id, router_id, claim, settled, chat)
        self.pending[history_id] = pending
        self.gate.pends(pending)
        return pending

    def settle(self, pending: PendingTurn) -> None:
        """A turn is bound or given up."""
        if self.pending.get(pending.history_id) is pending:
            del self.pending[pending.history_id]
        self.gate.settled(pending)
        pending.settle()

    def give_up(self, pending: PendingTurn) -> None:
        """Nobody wants a turn any more that is to be placed."""
        if pending.granted is None:
            self.settle(pending)
        elif not pending.granted.done():
            # `place`, which waits for it, settles it: who is in line is always in `pending`.
            self.admission.leave(pending.history_id)
            pending.granted.cancel()
        else:
            # There is room for it, and `place` does not know yet.
            pending.given_up = True

    # --- room --------------------------------------------------------------------------------

    def admit(self) -> None:
        """Let those go for whom there is room by now."""
        for admitted in self.admission.admit(unix_s()):
            self.accounts.bound(admitted)
            granted = self.pending[admitted.history.id].granted
            assert granted is not None
            granted.set_result(admitted)
        self.end_displaced()

    def relieve(self, decoder_id: str | None) -> None:
        """Have idle histories leave a decoder that holds more than it should."""
        memory = self.table.memory
        if decoder_id not in self.table.decoders:
            return
        self.accounts.look(decoder_id)
        if memory is None:
            return
        decoders = self.table.accepting_decoders
        memory.relieve(self.table.decoders[decoder_id], decoders, unix_s())
        self.forget()

    def forget(self) -> None:
        """Have decoders told what paused histories have left there for nobody."""
        memory = self.table.memory
        for one in () if memory is None else memory.take_forgotten():
            self.registry.note_forgotten(one.decoder_id, one.history_id, one.incarnation)

    def end_displaced(self) -> None:
        """Tell of the histories that have made room for others of their conversations."""
        for history in self.table.take_displaced():
            self.has_ended(history, "displaced")

    def has_ended(self, history: History, reason: str) -> None:
        """Tell everybody that a conversation has ended."""
        self.accounts.ended(history, reason)
        self.registry.note_ended(history)
