"""Finds the history that a turn is of, and binds it to a decoder, now or when there is room."""

import asyncio
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from conserve import identity
from conserve.admission import Admission, Admitted, QueueFull
from conserve.clock import unix_s
from conserve.conversations import ConversationTable
from conserve.histories.kinship import Opening
from conserve.history import History
from conserve.recognition import Chain
from conserve.tenants.limits import Over
from conserve.turn import Reason
from deployments.messages import BeginTurn, Refusal, TurnPlan, TurnTenant, Uncounted
from deployments.table import refusals
from deployments.table.accounts import Accounts
from deployments.table.registry import Registry
from deployments.table.room import PendingTurn, Room, TenantGate
from deployments.table.running import LOOK_S, MOVE_S, Listeners, RunningTurns

logger = logging.getLogger("conserve.table")

Placed = TurnPlan | Uncounted | Refusal


@dataclass(eq=False)
class Placing:
    """Begins turns where their histories are bound, or where there is room, once there is."""

    table: ConversationTable
    admission: Admission
    registry: Registry
    accounts: Accounts
    gate: TenantGate
    listeners: Listeners
    room: Room
    running: RunningTurns
    # By router, and its number for the call.
    _calls: dict[tuple[str, int], asyncio.Task[Placed]] = field(default_factory=dict)
    # Numbers of histories within a conversation. The clock is above those of a predecessor.
    _numbers: Iterator[int] = field(default_factory=lambda: count(time.time_ns() // 1_000_000))

    async def begin(self, asked: BeginTurn) -> Placed:
        """Begin a turn; a call that is cancelled leaves nothing behind."""
        key = asked.router_id, asked.number
        self._calls[key] = call = asyncio.ensure_future(self._begin(asked))
        try:
            await asyncio.wait([call])
        finally:
            self._calls.pop(key, None)  # It may have been asked twice.
            call.cancel()
        return refusals.UNAVAILABLE if call.cancelled() else call.result()

    def cancel(self, router_id: str, number: int) -> None:
        """Give up a call; of one that has returned, the router has the turn abandoned."""
        call = self._calls.get((router_id, number))
        if call is not None:
            call.cancel()

    def router_lost(self, router_id: str) -> None:
        for of, number in list(self._calls):
            if of == router_id:
                self.cancel(of, number)

    async def _begin(self, asked: BeginTurn) -> Placed:
        if asked.digest and (plan := await self.running.rejoin(asked.digest, asked.router_id)):
            return plan
        tenant, chain = asked.tenant, asked.chain or None
        if chain is not None:
            chain = self.table.rooted(chain)
        decoder_ids = set() if asked.refused_by is None else {asked.refused_by}
        if chain and asked.history_id is None:
            decoder_ids |= self.table.to_be_heard(chain, asked.explicit_id)
        if decoder_ids:
            # All that they have done before has to be known: another turn, say.
            await self.listeners.have_heard(decoder_ids, LOOK_S)
        if chain:
            self.running.pass_over(chain)
        history_id = asked.history_id or self._history_of(asked.explicit_id, chain, tenant)
        if over := self.gate.turn_over(tenant):
            return self._over_limit(tenant, over)
        with self.gate.arriving(tenant):
            while (other := self.room.pending.get(history_id)) is not None:
                await asyncio.wait([other.settled])
        if asked.router_id in self.registry.lost_routers:
            return refusals.UNAVAILABLE
        if over := self.gate.conversation_over(tenant, history_id, unix_s()):
            return self._over_limit(tenant, over)
        history = self.table.begin(
            history_id, unix_s(), asked.hints, asked.prompt_tokens, asked.encode_tokens,
            adapter=asked.adapter,
        )  # fmt: skip
        if history is not None:
            prefiller_id = self.table.prefill_later_turn(history)
            turn = history.newest_turn
            return self.running.plan(turn, history, prefiller_id, asked.router_id, later=True)
        if asked.prompt_tokens is None:
            counters = self.registry.counters()
            return Uncounted(history_id, counters[0]) if counters else refusals.UNAVAILABLE
        opening = Opening(
            chain, asked.system_tokens, asked.hints, asked.encode_tokens, asked.adapter
        )
        with self.room.placing(history_id, chat=chain is not None) as pending:
            return await self._place(pending, asked, asked.prompt_tokens, opening)

    def _history_of(
        self, explicit_id: str | None, chain: Chain | None, tenant: TurnTenant | None
    ) -> str:
        """Return the id of the history that a turn continues, or begins."""
        found = self.table.recognise(chain, explicit_id) if chain else None
        if found is not None and found not in self.room.pending:
            return found
        if explicit_id is None:
            return identity.scoped(tenant.name if tenant else None, identity.new_id())
        first = self.table.get(explicit_id)
        if not chain:
            # Completions are one history, beside those of chats.
            beside = identity.further(explicit_id, 0)
            pending = self.room.pending.get(explicit_id)
            chats = first.root is not None if first else pending is not None and pending.chat
            return beside if chats or beside in self.table else explicit_id
        if first is None and explicit_id not in self.room.pending:
            return explicit_id
        return identity.further(explicit_id, next(self._numbers))

    async def _place(
        self, pending: PendingTurn, asked: BeginTurn, prompt_tokens: int, opening: Opening
    ) -> TurnPlan | Refusal:
        """Bind a history, now or when there is room, and begin its turn there."""
        history_id, tenant, called_s = pending.history_id, asked.tenant, unix_s()
        largest = max((one.capacity_tokens for one in self.table.decoders.values()), default=0)
        if largest and prompt_tokens > largest:
            return refusals.never_fits(prompt_tokens, largest)
        # Where it was before, a turn may have begun.
        if was_on := self.table.notices.unconfirmed(history_id):
            if not await self.listeners.have_heard(was_on, MOVE_S):
                logger.warning("%s moves; decoder %s is silent", history_id, was_on)
            bound = self.table.begin(history_id, called_s, asked.hints)
            if bound is not None:
                return self.running.plan(
                    bound.newest_turn, bound, None, asked.router_id, later=True
                )
        if over := self.gate.binding_over(tenant, prompt_tokens - self.table.held(opening)):
            return self._over_limit(tenant, over)
        arrived_s = called_s - asked.waited_s
        history: History | None = None
        weight = 1 if tenant is None else tenant.weight
        try:
            # A decoder may be lost between the binding and now.
            while history is None or history.home is None:
                admitted = await self._admitted(pending, prompt_tokens, arrived_s, opening, weight)
                if (coming := admitted.placement.after) is not None:
                    await self.running.has_come(admitted.turn, coming)
                history = self.table.get(history_id)
        except QueueFull as full:
            self.accounts.turned_away(history_id, "queue_full")
            return refusals.queue_full(full)
        except TimeoutError:
            self.accounts.turned_away(history_id, "timeout")
            retry_after_s = self.admission.queue.retry_after_s(unix_s())
            return refusals.timed_out(prompt_tokens, self.admission.queue.timeout_s, retry_after_s)
        self.accounts.metrics.queue_wait_s.observe(unix_s() - called_s)
        turn, prefiller_id = admitted.turn, admitted.placement.prefiller_id
        reason = _reason(admitted)
        return self.running.plan(turn, history, prefiller_id, asked.router_id, reason=reason)

    async def _admitted(
        self, pending: PendingTurn, prompt_tokens: int, arrived_s: float, opening: Opening,
        weight: int,
    ) -> Admitted:  # fmt: skip
        """Bind a conversation, now or when there is room. Raises `QueueFull` or `TimeoutError`."""
        answer = self.admission.enter(
            pending.history_id, prompt_tokens, unix_s(), arrived_s, opening, weight
        )
        self.room.end_displaced()
        if isinstance(answer, Admitted):
            self.accounts.bound(answer)
            return answer
        why, since_s = self.accounts.waits(pending.history_id, prompt_tokens), unix_s()
        granted: asyncio.Future[Admitted] = asyncio.get_running_loop().create_future()
        pending.granted = granted
        try:
            # Not wait_for, which on Python 3.12 can lose what comes at the moment in which its time
            # is up.
            await asyncio.wait([granted], timeout=self.admission.queue.timeout_s)
            if not granted.done():
                raise TimeoutError
            admitted = granted.result()
            self.accounts.has_waited(admitted.turn, unix_s() - since_s, why)
            return admitted
        except asyncio.CancelledError:
            if granted.done():
                # Only this call knows of the turn.
                self.running.abandon(granted.result().turn)
            raise
        finally:
            pending.granted = None
            if not granted.done():
                self.admission.leave(pending.history_id)
            # The head may have gone: the next one may fit.
            self.room.admit()

    def _over_limit(self, tenant: TurnTenant | None, over: Over) -> Refusal:
        assert tenant is not None
        self.accounts.over_limit(tenant.name, over)
        return refusals.over_limit(tenant.name, over)


def _reason(admitted: Admitted) -> Reason:
    if not admitted.newly_bound:
        return "home"
    if admitted.moved:
        return "moved"
    if admitted.known:
        return "resumed"
    return "new" if admitted.history.base is None else "branch"
