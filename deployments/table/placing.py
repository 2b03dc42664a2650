"""Finds the history that a turn is of, and binds it to a decoder, now or when there is room."""

import asyncio
import logging
from dataclasses import dataclass, replace

from conserve import identity
from conserve.admission import Admission, Admitted, QueueFull
from conserve.clock import unix_s
from conserve.conversations import ConversationTable
from conserve.histories.kinship import Opening
from conserve.recognition import Chain
from conserve.tenants.limits import Over
from conserve.turn import Reason
from deployments.messages import BeginTurn, PlaceTurn, Refusal, TurnPlan, TurnTenant, Unplaced
from deployments.table import refusals
from deployments.table.accounts import Accounts
from deployments.table.listeners import LOOK_S, MOVE_S, Listeners
from deployments.table.registry import Registry
from deployments.table.room import PendingTurn, Room, TenantGate
from deployments.table.running import RunningTurns

logger = logging.getLogger("conserve.table")

# Longest time from `begin` to `place`, for counting tokens, and from room to binding.
PLACING_S = 30.0


@dataclass(eq=False)
class Placing:
    """Begins turns whose histories are bound, and has the others wait for room."""

    table: ConversationTable
    admission: Admission
    registry: Registry
    accounts: Accounts
    gate: TenantGate
    listeners: Listeners
    room: Room
    running: RunningTurns

    # --- those that are bound ----------------------------------------------------------------

    async def begin(self, asked: BeginTurn) -> TurnPlan | Unplaced | Refusal:
        tenant, chain = asked.tenant, asked.chain and self.table.rooted(asked.chain)
        decoder_ids = set() if asked.refused_by is None else {asked.refused_by}
        if chain and asked.history_id is None:
            decoder_ids |= self.table.to_be_heard(chain, asked.explicit_id)
        if decoder_ids:
            # All that they have done before has to be known: another turn, say.
            await self.listeners.have_heard(decoder_ids, LOOK_S)
        history_id = asked.history_id or self._history_of(asked.explicit_id, chain, tenant)
        if over := self.gate.turn_over(tenant):
            return self._over_limit(tenant, over)
        with self.gate.arriving(tenant):
            await self._others_are_bound(history_id)
        if self.registry.router_is_lost(asked.router_id):
            return refusals.UNAVAILABLE
        if over := self.gate.conversation_over(tenant, history_id, unix_s()):
            return self._over_limit(tenant, over)
        history = self.table.begin(
            history_id, unix_s(), asked.hints, asked.prompt_tokens, asked.encode_tokens
        )
        if history is not None:
            prefiller_id = self.table.prefill_later_turn(history)
            turn = history.newest_turn
            return self.running.plan(turn, history, prefiller_id, asked.router_id, later=True)
        counter = self.registry.tokenizer()
        if counter is None:
            return refusals.UNAVAILABLE
        # 0: no claim. Another turn of this history is still queued, so `forgo` must not cancel it.
        claim = 0
        if history_id not in self.room.pending:
            claim = self.room.pend(history_id, asked.router_id, bool(chain)).claim
        return Unplaced(history_id, counter.url, counter.id, counter.max_model_len, claim)

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
        return identity.further(explicit_id, self.room.new_claim())

    async def _others_are_bound(self, history_id: str) -> None:
        """Return when no turn of the conversation is pending, or one has been for too long."""
        while (pending := self.room.pending.get(history_id)) is not None:
            await asyncio.wait([pending.settled], timeout=self.admission.line.timeout_s + PLACING_S)
            if not pending.settled.done():
                if not pending.waits:
                    # A router that died in between never settles it.
                    self.room.settle(pending)
                break

    # --- those that are not ------------------------------------------------------------------

    async def place(self, asked: PlaceTurn) -> TurnPlan | Refusal:
        history_id, prompt_tokens = asked.history_id, asked.prompt_tokens
        tenant, opening = asked.tenant, asked.opening
        if opening is not None and opening.chain is not None:
            opening = replace(opening, chain=self.table.rooted(opening.chain))
        called_s = unix_s()
        pending = self.room.pending.get(history_id)
        if pending is not None and pending.waits:
            # Both were told `Unplaced`, the second when it had waited for the first for too long.
            return refusals.busy(self.admission.line.retry_after_s(called_s))
        if pending is None:
            # The turn is unknown: a predecessor of this table was asked to begin it, or another
            # router has given it up.
            over = self.gate.turn_over(tenant)
            if over := over or self.gate.conversation_over(tenant, history_id, called_s):
                return self._over_limit(tenant, over)
            chat = opening is not None and opening.chain is not None
            pending = self.room.pend(history_id, asked.router_id, chat, asked.claim)
        arrived_s = called_s - asked.waited_s
        try:
            largest = max((one.capacity_tokens for one in self.table.decoders.values()), default=0)
            if largest and prompt_tokens > largest:
                return refusals.never_fits(prompt_tokens, largest)
            hints = None if opening is None else opening.hints
            # Where it was before, a turn may have begun.
            was_on = self.table.notices.unconfirmed(history_id)
            if was_on and not await self.listeners.have_heard(was_on, MOVE_S):
                logger.warning("%s moves; decoder %s is silent", history_id, was_on)
            if pending.settled.done():
                return refusals.UNAVAILABLE  # It was given up meanwhile.
            if pending.waits:
                return refusals.busy(self.admission.line.retry_after_s(called_s))
            bound = self.table.begin(history_id, called_s, hints)
            if bound is not None:
                # Another turn of it was placed meanwhile, or a decoder had it still.
                turn = bound.newest_turn
                return self.running.plan(turn, bound, None, asked.router_id, later=True)
            shared_tokens = 0 if opening is None else self.table.held(opening)
            if over := self.gate.binding_over(tenant, prompt_tokens - shared_tokens):
                return self._over_limit(tenant, over)
            admitted = await self._admitted(pending, prompt_tokens, arrived_s, opening)
            history = self.table.get(history_id)
            while not pending.given_up and (history is None or history.decoder_id is None):
                # Its decoder was lost between the binding and now.
                admitted = await self._admitted(pending, prompt_tokens, arrived_s, opening)
                history = self.table.get(history_id)
        except QueueFull as full:
            self.accounts.turned_away(history_id, "queue_full")
            return refusals.queue_full(full)
        except TimeoutError:
            self.accounts.turned_away(history_id, "timeout")
            retry_after_s = self.admission.line.retry_after_s(unix_s())
            return refusals.timed_out(prompt_tokens, self.admission.line.timeout_s, retry_after_s)
        finally:
            if not pending.waits:  # Else another call places it.
                self.room.settle(pending)
        if pending.given_up or history is None:
            self.running.abandon(admitted.turn)
            return refusals.UNAVAILABLE
        self.accounts.metrics.queue_wait_s.observe(unix_s() - called_s)
        prefiller_id = admitted.placement.prefiller_id
        reason = _reason(admitted)
        return self.running.plan(
            admitted.turn, history, prefiller_id, asked.router_id, reason=reason
        )

    def forgo(self, history_id: str, claim: int) -> None:
        pending = self.room.pending.get(history_id)
        if pending is not None and pending.claim == claim:
            self.room.give_up(pending)

    async def _admitted(
        self, pending: PendingTurn, prompt_tokens: int, arrived_s: float, opening: Opening | None
    ) -> Admitted:
        """Bind a conversation, now or when there is room.

        Raises `QueueFull`, `TimeoutError`, or `asyncio.CancelledError` if it was given up
        (`forgo`).
        """
        answer = self.admission.enter(
            pending.history_id, prompt_tokens, unix_s(), arrived_s, opening
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
            await asyncio.wait([granted], timeout=self.admission.line.timeout_s)
            if not granted.done():
                raise TimeoutError
            admitted = granted.result()
            self.accounts.has_waited(admitted.turn, unix_s() - since_s, why)
            return admitted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                # This call is being ended, and only it knows of the turn.
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
