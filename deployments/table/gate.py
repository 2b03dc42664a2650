"""Holding tenants to their limits, by all that the table knows of: what runs and what waits."""

import contextlib
from collections.abc import Iterator

from conserve import identity
from conserve.admission import WaitingLine
from conserve.conversations import ConversationTable
from conserve.tenants.limits import Over
from deployments.messages import TurnTenant
from deployments.table.pending import PendingTurn

# When to try again where nobody knows: turns end soon, conversations do not.
_TURN_S, _CONVERSATION_S = 1, 10


class TenantGate:
    """Says whether a turn would break a limit of its tenant; nothing is counted by asking.

    A turn counts from `arriving` to its end: while it waits for another of its conversation, then
    as a pending one, then as one that runs. At each moment it is one of the three.
    """

    def __init__(self, table: ConversationTable, line: WaitingLine) -> None:
        self._table = table
        self._line = line
        self._arriving: dict[str, int] = {}
        self._pending: dict[str, set[PendingTurn]] = {}

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
        turns = self._table.usage.tenant(tenant.name).turns
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
        limits, usage = tenant.limits, self._table.usage.tenant(tenant.name)
        if limits.held_tokens is not None and usage.held_tokens >= limits.held_tokens:
            return Over("held_tokens", limits.held_tokens, _CONVERSATION_S)
        if limits.conversations is None and limits.new_per_minute is None:
            return None
        unbound = self._unbound(tenant.name)
        new = {one.history_id for one in unbound if one.history_id not in self._table}
        if history_id in self._table or history_id in new:
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
        waiting = self._line.tokens_of(beginning) if self._line else 0
        return self._table.usage.tenant(name).held_tokens + waiting
