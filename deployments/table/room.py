"""Turns whose conversations are bound nowhere yet, and the room that they wait for."""

import asyncio
import itertools
import time

from conserve.admission import Admission
from conserve.clock import unix_s
from conserve.conversations import ConversationTable
from conserve.history import History
from deployments.table.accounts import Accounts
from deployments.table.gate import TenantGate
from deployments.table.pending import PendingTurn
from deployments.table.registry import Registry


class Room:
    """Lets pending turns go as room comes free, and tells what gave it up.

    Args:
        gate: counts pending turns, too.

    Attributes:
        pending: by the history; one each.
    """

    def __init__(
        self,
        table: ConversationTable,
        admission: Admission,
        registry: Registry,
        accounts: Accounts,
        gate: TenantGate,
    ) -> None:
        self._table = table
        self._admission = admission
        self._registry = registry
        self._accounts = accounts
        self._gate = gate
        self.pending: dict[str, PendingTurn] = {}
        # The clock is above whatever a predecessor handed out, of which nothing is kept.
        self._claims = itertools.count(time.time_ns() // 1_000_000)

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
        self._gate.pends(pending)
        return pending

    def settle(self, pending: PendingTurn) -> None:
        """A turn is bound or given up."""
        if self.pending.get(pending.history_id) is pending:
            del self.pending[pending.history_id]
        self._gate.settled(pending)
        pending.settle()

    def give_up(self, pending: PendingTurn) -> None:
        """Nobody wants a turn any more that is to be placed."""
        if pending.granted is None:
            self.settle(pending)
        elif not pending.granted.done():
            # `place`, which waits for it, settles it: who is in line is always in `pending`.
            self._admission.leave(pending.history_id)
            pending.granted.cancel()
        else:
            # There is room for it, and `place` does not know yet.
            pending.given_up = True

    # --- room --------------------------------------------------------------------------------

    def admit(self) -> None:
        """Let those go for whom there is room by now."""
        for admitted in self._admission.admit(unix_s()):
            self._accounts.bound(admitted)
            granted = self.pending[admitted.history.id].granted
            assert granted is not None
            granted.set_result(admitted)
        self.end_displaced()

    def relieve(self, decoder_id: str | None) -> None:
        """Have idle histories leave a decoder that holds more than it should."""
        memory = self._table.memory
        if decoder_id not in self._table.decoders:
            return
        self._accounts.look(decoder_id)
        if memory is None:
            return
        decoders = self._table.accepting_decoders
        memory.relieve(self._table.decoders[decoder_id], decoders, unix_s())
        self.forget()

    def forget(self) -> None:
        """Have decoders told what paused histories have left there for nobody."""
        memory = self._table.memory
        for one in () if memory is None else memory.take_forgotten():
            self._registry.note_forgotten(one.decoder_id, one.history_id, one.incarnation)

    def end_displaced(self) -> None:
        """Tell of the histories that have made room for others of their conversations."""
        for history in self._table.take_displaced():
            self.has_ended(history, "displaced")

    def has_ended(self, history: History, reason: str) -> None:
        """Tell everybody that a conversation has ended."""
        self._accounts.ended(history, reason)
        self._registry.note_ended(history)
