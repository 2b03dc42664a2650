"""Keeps the turns that wait to be placed, within their tenants' limits."""

import asyncio
import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from conserve import identity
from conserve.admission import Admission, Admitted, Queue
from conserve.clock import unix_s
from conserve.conversations import ConversationTable
from conserve.history import History
from conserve.tenants.limits import Over
from deployments.messages import TurnTenant
from deployments.table.accounts import Accounts
from deployments.table.registry import Registry


@dataclass(slots=True, eq=False)
class PendingTurn:
    """A turn whose history is bound nowhere, while it is placed. Its call of `begin` owns it.

    Attributes:
        chat: whether it has messages.
        settled: done once the call is over; other turns of the history wait for that.
        granted: None unless it waits for room; done when there is some.
    """

    history_id: str
    chat: bool
    settled: asyncio.Future[None]
    granted: asyncio.Future[Admitted] | None = None

    @property
    def has_room(self) -> bool:
        """Whether it is bound already, and its call only has to notice."""
        return self.granted is not None and self.granted.done()


# When to try again, where that is not known: turns end soon, conversations do not.
_TURN_S, _CONVERSATION_S = 1, 10


@dataclass(eq=False)
class TenantGate:
    """Says whether a turn would break a limit of its tenant; nothing is counted by asking.

    A turn counts from `arriving` to its end: while it waits for another of its conversation, then
    as a pending one, then as one that runs. At each moment it is one of the three.
    """

    table: ConversationTable
    queue: Queue
    _arriving: Counter[str] = field(default_factory=Counter)
    # By tenant; None: there are no keys.
    _pending: defaultdict[str | None, set[PendingTurn]] = field(
        default_factory=lambda: defaultdict(set)
    )

    @contextlib.contextmanager
    def arriving(self, tenant: TurnTenant | None) -> Iterator[None]:
        """Count a turn that is neither pending nor running yet."""
        if tenant is None:
            yield
            return
        self._arriving[tenant.name] += 1
        try:
            yield
        finally:
            self._arriving[tenant.name] -= 1

    def pends(self, pending: PendingTurn) -> None:
        self._pending[identity.tenant_of(pending.history_id)].add(pending)

    def settled(self, pending: PendingTurn) -> None:
        self._pending[identity.tenant_of(pending.history_id)].discard(pending)

    def turn_over(self, tenant: TurnTenant | None) -> Over | None:
        """Return the limit that one more turn would break, whatever its conversation is."""
        if tenant is None or tenant.limits.turns is None:
            return None
        turns = self.table.usage.tenant(tenant.name).turns
        turns += self._arriving[tenant.name] + len(self._unbound(tenant.name))
        if turns < tenant.limits.turns:
            return None
        return Over("turns", tenant.limits.turns, _TURN_S)

    def conversation_over(
        self, tenant: TurnTenant | None, history_id: str, now_s: float
    ) -> Over | None:
        """Return the limit that a turn of this history would break.

        Histories count as conversations, since one id may have any number of them.
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
        """Return the limit that binding a conversation with this prompt would break."""
        if tenant is None or tenant.limits.held_tokens is None:
            return None
        allowed = tenant.limits.held_tokens
        if prompt_tokens > allowed:
            return Over("held_tokens", allowed, _CONVERSATION_S, never=True)
        if self._tokens(tenant.name) + prompt_tokens > allowed:
            return Over("held_tokens", allowed, _CONVERSATION_S)
        return None

    def _unbound(self, name: str) -> list[PendingTurn]:
        return [one for one in self._pending[name] if not one.has_room]

    def _tokens(self, name: str) -> int:
        """Count the tokens that are held, and those that queued turns ask for."""
        waiting = self.queue.tokens_of(identity.scoped(name, "")) if self.queue else 0
        return self.table.usage.tenant(name).held_tokens + waiting


@dataclass(eq=False)
class Room:
    """Keeps the pending turns, one a history, and admits them as room comes free."""

    table: ConversationTable
    admission: Admission
    registry: Registry
    accounts: Accounts
    gate: TenantGate
    pending: dict[str, PendingTurn] = field(default_factory=dict)

    @contextlib.contextmanager
    def placing(self, history_id: str, *, chat: bool) -> Iterator[PendingTurn]:
        """Keep a turn pending within the block; other turns of its history wait for its end."""
        pending = PendingTurn(history_id, chat, asyncio.get_running_loop().create_future())
        self.pending[history_id] = pending
        self.gate.pends(pending)
        try:
            yield pending
        finally:
            del self.pending[history_id]
            self.gate.settled(pending)
            pending.settled.set_result(None)

    def admit(self, rested: str | None = None) -> None:
        for admitted in self.admission.admit(unix_s(), rested):
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
        """Have decoders told to forget what paused histories have left there."""
        memory = self.table.memory
        for one in () if memory is None else memory.take_forgotten():
            self.registry.note_forgotten(one.decoder_id, one.history_id, one.incarnation)

    def end_displaced(self) -> None:
        """End histories that gave their room to newer histories of the same conversation."""
        for history in self.table.take_displaced():
            self.has_ended(history, "displaced")

    def has_ended(self, history: History, reason: str) -> None:
        """Note that a conversation has ended, and have its decoder told."""
        self.accounts.ended(history, reason)
        if history.home is not None:
            self.registry.note_forgotten(history.home, history.id, history.incarnation)
