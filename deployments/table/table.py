"""The conversation table's actor: the one authority for bindings, and who waits for one.

Its state is soft. If the process dies, Ray starts it again and the engines, which notice at
their next beat, tell it who they are and what they hold; turns wait until all have, or for
``RECOVERY_S``. See docs/architecture.md.

What it decides is elsewhere and pure: where a conversation goes in `conserve.placement`, who goes
first in `conserve.admission`, what is held where in `conserve.conversations`, how many engines
there are to be in `autoscale`.
"""

import asyncio
import contextlib
import itertools
import logging
import time
from typing import Any

import ray

from autoscale.capacity.engine_costs import engine_costs
from autoscale.configured import make_autoscaler
from conserve import identity
from conserve.admission import Admission, Admitted, QueueFull
from conserve.clock import unix_s
from conserve.conversation import Conversation, TurnKey, TurnStats
from conserve.conversations import ConversationTable
from conserve.direct import LEASE_S, Began, Ended, Notice, Report
from conserve.environments.pressure import HostPressure
from conserve.events import EventLog, Kind
from conserve.hints import Hints
from conserve.histories.kinship import Opening
from conserve.pausing import ToolReport, TooManyTools
from conserve.placement.load import EngineLoad
from conserve.recognition import Chain, Digest
from conserve.settings import Settings
from conserve.tenants.limits import Over
from conserve.wire import BEAT_S, SILENCE_S
from deployments.messages import (
    EngineInfo,
    EventPage,
    Heard,
    Lifecycle,
    Prefilled,
    Refusal,
    TurnPlan,
    TurnTenant,
    TurnTiming,
    Unplaced,
)
from deployments.table import refusals
from deployments.table.accounts import Accounts
from deployments.table.gate import TenantGate
from deployments.table.lifecycle import standings
from deployments.table.listeners import Listeners
from deployments.table.listening import SHOWN_EVENTS, listen
from deployments.table.listing import list_recent
from deployments.table.pending import PendingTurn
from deployments.table.registry import Registry
from deployments.table.views import conversation_view, engine_view
from hetero.energy import EngineEnergy

logger = logging.getLogger("conserve.table")

# Longest time from `begin` to `place`, for counting tokens, and from room to binding.
PLACING_S = 30.0
# How long a new table waits for engines to report before it takes bindings for unknown.
RECOVERY_S = 8.0
# How long it waits for decoders to say what they have done: whoever asks what there is, begins a
# turn beside another or ends a conversation, as long as a decoder may begin turns; and whoever
# moves one, as long as a decoder may be silent.
_LOOK_S, _MOVE_S = LEASE_S, SILENCE_S
# Under these policies a later turn is its decoder's alone.
_DIRECT = ("conversation", "collocated", "elastic")
# Without a beat from any engine or router for so long, the application is gone.
ABANDONED_S = 120.0


class TableService:
    """What the actor does; `TableClient` makes it one."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        # The clock is above whatever a predecessor handed out, of which nothing is kept.
        self._claims = itertools.count(time.time_ns() // 1_000_000)
        # Turns are numbered by hundreds.
        first_id = time.time_ns() // 1000
        # Theirs is finer: there may be several in a millisecond.
        self._events = EventLog(unix_s, time.time_ns() // 1000)
        self._table = ConversationTable(
            settings.policy(engine_costs(settings)),
            settings.idle_timeout_s,
            settings.turn_timeout_s,
            first_id,
            settings.pausing_policy(),
            self._events,
        )
        self._admission = Admission(
            self._table,
            settings.queue_limit,
            settings.queue_timeout_s,
            settings.line_order(),
            settings.admission_window(),
        )
        self._listeners = Listeners(self._table.notices)
        self._gate = TenantGate(self._table, self._admission.line)
        self._autoscaler = make_autoscaler(settings)
        self._started_s = time.monotonic()
        self._registry = Registry(self._table, self._started_s)
        self._accounts = Accounts(
            self._table, self._admission, self._registry, self._autoscaler, self._events
        )
        # What a router that dies leaves behind: turns under way, and those not bound yet, by the
        # conversation.
        self._routers_of: dict[TurnKey, str] = {}
        # Of the same turns.
        self._decoders_of: dict[TurnKey, str] = {}
        self._pending: dict[str, PendingTurn] = {}
        # Nothing is decided yet: a predecessor's engines are still to say how many were wanted.
        self._decided_s = 0.0
        self._recovered = asyncio.Event()
        self._housekeeping: asyncio.Task[None] | None = None
        # Of the machine on which tools run: what was told last, and when.
        self._host = HostPressure()
        self._host_told_s = self._started_s

    # --- engines -----------------------------------------------------------------------------

    async def register(self, engine: EngineInfo) -> list[tuple[str, int]]:
        """Add an engine that is ready. Returns conversations (and incarnations) to forget."""
        self._ensure_housekeeping()
        now_s = time.monotonic()
        known = self._registry.engines.get(engine.id)
        if known is not None and engine.registration:
            # It has not heard that it is known; what it has done since is in what it holds.
            self._remove(known)
        forget = self._registry.add(engine, now_s)
        if engine.wanted_replicas is not None and now_s - self._started_s <= SILENCE_S:
            # A predecessor has wanted so many engines, and they are there.
            self._autoscaler.adopt(engine.role, engine.wanted_replicas, now_s)
        self._accounts.engine_ready(engine)
        logger.info("%s %s is ready at %s", engine.role, engine.id, engine.url)
        if self._complete():
            self._recovered.set()
        self._admit()
        return forget

    async def beat(
        self, engine_id: str, energy: EngineEnergy | None = None, load: EngineLoad | None = None
    ) -> Heard | None:
        """Note that an engine lives. Returns what it has to know, or None: register again.

        Args:
            energy: what its GPUs have used, where that is known.
            load: of its work.
        """
        engine = self._registry.engine_beat(engine_id, time.monotonic())
        if engine is None:
            return None
        if energy is not None:
            self._accounts.charge(engine, energy)
        if load is not None:
            self._registry.loads[engine_id] = load
            self._table.engine_says(engine_id, load, unix_s())
        ended = self._registry.take_ended(engine_id)
        return Heard(ended, self._autoscaler.replicas(engine.role), self._decided_s)

    async def engine_lost(self, engine_id: str, why: str) -> None:
        """Remove an engine that is dead."""
        engine = self._registry.engines.get(engine_id)
        if engine is None:
            return
        self._end_turns_on(engine_id)
        unbound = self._remove(engine)
        self._accounts.engine_gone(engine, len(unbound), why)
        logger.warning(
            "%s %s is lost (%s); %d conversations will be prefilled again on their next turn",
            engine.role, engine_id, why, len(unbound),
        )  # fmt: skip

    async def leave(self, engine_id: str, overdue: bool) -> bool:
        """Let an engine go: it gets nothing new.

        Args:
            overdue: whether its time to drain is up: then its conversations are unbound, each once
                none of its turns runs.

        Returns:
            Whether it should stay and ask again, because of what it has.
        """
        engine = self._registry.engines.get(engine_id)
        if engine is None:
            # This is a new table, with which it has not registered yet; or it was lost.
            return not overdue
        if not self._table.is_leaving(engine_id):
            self._table.leave(engine_id)
            logger.info("%s %s is leaving", engine.role, engine_id)
        if not self._registry.has_routers and time.monotonic() - self._started_s > SILENCE_S:
            # Routers belong to a new deployment, with a table of its own: no turn comes here.
            return False
        prefills = False
        if engine.role == "prefiller":
            prefills = self._table.prefillers[engine_id].queued_tokens > 0 and not overdue
        if not engine.hosts:
            return prefills
        if overdue or not self._table.accepting_decoders:
            # With no other decoder the application ends, as a rule. Or the others have died: then
            # turns that run are not cut, and the rest is prefilled again once there is another.
            unbound = self._table.evict(engine_id)
            if unbound:
                logger.info(
                    "%s %s leaves: %d conversations will be prefilled again elsewhere",
                    engine.role, engine_id, len(unbound),
                )  # fmt: skip
            self._admit()
        return prefills or self._table.decoders[engine_id].conversations > 0

    async def left(self, engine_id: str) -> None:
        """Remove an engine that was leaving, and ends now."""
        engine = self._registry.engines.get(engine_id)
        if engine is not None:
            self._end_turns_on(engine_id)
            unbound = self._remove(engine)
            self._accounts.engine_gone(engine, len(unbound))
            logger.info(
                "%s %s has left, with %d conversations", engine.role, engine_id, len(unbound)
            )

    def _remove(self, engine: EngineInfo) -> list[str]:
        unbound = self._registry.remove(engine)
        for turn in self._listeners.lost(engine.id):
            self._turn_ends(turn, None)
        return unbound

    def _end_turns_on(self, engine_id: str) -> None:
        """Of what a lost engine had under way, or has ended last, it tells nothing any more."""
        for turn in [turn for turn, on in self._decoders_of.items() if on == engine_id]:
            history = self._table.get(turn.conversation_id)
            if history is not None:
                if history.prefiller_id is not None:
                    # It may not have come there yet: its router tells.
                    continue
                self._accounts.cut(turn, engine_id, None)
            self._turn_ends(turn, None)

    # --- decoders that begin turns by themselves ---------------------------------------------

    async def hear(self, decoder_id: str, registration: int, heard: int) -> Notice | None:
        """What a decoder is to know before it begins more; None: register again. It may wait.

        Args:
            heard: the last notice that it has obeyed.
        """
        notice = await self._listeners.hear(decoder_id, registration, heard)
        return None if notice is None else notice._replace(parks=self._parks_on(decoder_id))

    async def report(self, decoder_id: str, registration: int, report: Report) -> bool | None:
        """Note what a decoder has done.

        Returns:
            Whether turns that begin now leave their KV in host memory; None: register again.
        """
        notices = self._table.notices
        if not notices.is_current(decoder_id, registration):
            return None
        for event in report.events if notices.is_new(decoder_id, report.number) else ():
            try:
                await self._happened(event, decoder_id)
            except Exception:
                # It would be told again for ever, and nothing after it.
                logger.exception("what decoder %s says of %s", decoder_id, event.turn)
        self._listeners.confirmed(decoder_id, report.heard)
        return self._parks_on(decoder_id)

    def _parks_on(self, decoder_id: str) -> bool:
        memory = self._table.memory
        return memory is not None and memory.parks_on(decoder_id)

    async def _happened(self, event: Began | Ended, decoder_id: str) -> None:
        turn = event.turn
        if isinstance(event, Began):
            if self._table.began(turn, decoder_id, unix_s(), event.parks):
                url = self._registry.engines[decoder_id].url
                plan = TurnPlan(turn, decoder_id, url, later=True, parks=event.parks)
                self._under_way(turn, event.router_id, decoder_id)
                self._listeners.began(turn, decoder_id)
                self._accounts.turn_begins(plan)
            return
        self._listeners.ended(turn, decoder_id)
        if not event.completed or event.stats is None:
            await self.abandon(turn, decoder_id, event.stats)
        elif not await self.advance(turn, decoder_id, event.stats, event.tails):
            # Ended or moved meanwhile: a table rebuilt from holdings must not revive it.
            self._registry.note_forgotten(decoder_id, turn.conversation_id, turn.incarnation)

    async def _look(self) -> None:
        """Return when all that decoders had done by now is known, or after a while."""
        await self._listeners.have_heard(self._table.notices.decoders, _LOOK_S)

    # --- turns -------------------------------------------------------------------------------

    async def begin(
        self,
        router_id: str,
        explicit_id: str | None,
        chain: Chain | None,
        tenant: TurnTenant | None = None,
        history_id: str | None = None,
        hints: Hints | None = None,
        refused_by: str | None = None,
        prompt_tokens: int | None = None,
    ) -> TurnPlan | Unplaced | Refusal:
        """Start a turn; returns where its history is bound, or that it has to be placed.

        Args:
            explicit_id: the conversation's, scoped to the tenant, if the client has stated it.
            chain: of its messages; None for a completion, which is recognised by its id alone.
            tenant: whose turn it is, where there are keys.
            history_id: the history's, if this is not the turn's first attempt.
            hints: what its client says beside its messages; None if nothing.
            refused_by: the decoder to which it went straight, in vain.
            prompt_tokens: length of its prompt, where it seems to append much; None: not known.
        """
        if refusal := await self._not_ready():
            return refusal
        if refused_by is None and chain and history_id is None:
            refused_by = self._table.to_be_heard(chain, explicit_id)
        if refused_by is not None:
            # Of what it has done before, all is to be known: another turn, say.
            await self._listeners.have_heard([refused_by], _LOOK_S)
        conversation_id = history_id or self._history_of(explicit_id, chain, tenant)
        if over := self._gate.turn_over(tenant):
            return self._over_limit(tenant, over)
        with self._gate.arriving(tenant):
            await self._others_are_bound(conversation_id)
        if self._registry.router_is_lost(router_id):
            return refusals.UNAVAILABLE
        if over := self._gate.conversation_over(tenant, conversation_id, unix_s()):
            return self._over_limit(tenant, over)
        conversation = self._table.begin(conversation_id, unix_s(), hints)
        if conversation is not None:
            prefiller_id = self._table.prefill_later_turn(conversation, prompt_tokens, unix_s())
            return self._plan(conversation.newest_turn, conversation, prefiller_id, router_id, True)
        counter = self._registry.tokenizer()
        if counter is None:
            return refusals.UNAVAILABLE
        claim = 0  # Of no turn: one that could not wait any longer for the one in line.
        if conversation_id not in self._pending:
            claim = self._pend(conversation_id, router_id, bool(chain)).claim
        return Unplaced(conversation_id, counter.url, counter.id, counter.max_model_len, claim)

    def _history_of(
        self, explicit_id: str | None, chain: Chain | None, tenant: TurnTenant | None
    ) -> str:
        """The id of the history that a turn continues, or begins."""
        found = self._table.recognise(chain, explicit_id) if chain else None
        if found is not None and found not in self._pending:
            return found
        if explicit_id is None:
            return identity.scoped(tenant.name if tenant else None, identity.new_id())
        first = self._table.get(explicit_id)
        if not chain:
            # Completions are one history, beside those of chats.
            beside = identity.further(explicit_id, 0)
            pending = self._pending.get(explicit_id)
            chats = first.root is not None if first else pending is not None and pending.chat
            return beside if chats or beside in self._table else explicit_id
        if first is None and explicit_id not in self._pending:
            return explicit_id
        return identity.further(explicit_id, next(self._claims))

    async def _others_are_bound(self, conversation_id: str) -> None:
        """Return when no turn of the conversation is pending, or one has been for too long."""
        while (pending := self._pending.get(conversation_id)) is not None:
            patience_s = self._settings.queue_timeout_s + PLACING_S
            await asyncio.wait([pending.settled], timeout=patience_s)
            if not pending.settled.done():
                if not pending.waits:
                    # A router that died in between never settles it.
                    self._settle(pending)
                break

    async def place(
        self,
        router_id: str,
        conversation_id: str,
        turn1_tokens: int,
        waited_s: float = 0.0,
        claim: int | None = None,
        tenant: TurnTenant | None = None,
        opening: Opening | None = None,
    ) -> TurnPlan | Refusal:
        """Bind a history for which `begin` answered `Unplaced`; waits for room.

        Args:
            conversation_id: the history's.
            waited_s: how long ago its first request came.
            claim: that answer's.
            tenant: as for `begin`.
            opening: what is known of the prompt beside its length.
        """
        called_s = unix_s()
        pending = self._pending.get(conversation_id)
        if pending is not None and pending.waits:
            # Both were told `Unplaced`, the second when it had waited for the first for too long.
            return refusals.busy(self._admission.line.retry_after_s(called_s))
        if pending is None:
            # Of this turn nothing is known (any more): the table before this one was asked to begin
            # it, or another router has given it up.
            over = self._gate.turn_over(tenant)
            if over := over or self._gate.conversation_over(tenant, conversation_id, called_s):
                return self._over_limit(tenant, over)
            chat = opening is not None and opening.chain is not None
            pending = self._pend(conversation_id, router_id, chat, claim)
        pending.arrived_s = called_s - waited_s
        try:
            largest = max((one.capacity_tokens for one in self._table.decoders.values()), default=0)
            if largest and turn1_tokens > largest:
                return refusals.never_fits(turn1_tokens, largest)
            hints = None if opening is None else opening.hints
            # Where it was before, a turn may have begun.
            was_on = self._table.notices.unconfirmed(conversation_id)
            if was_on and not await self._listeners.have_heard(was_on, _MOVE_S):
                logger.warning("%s moves; decoder %s is silent", conversation_id, was_on)
            if pending.settled.done():
                return refusals.UNAVAILABLE  # It was given up meanwhile.
            if pending.waits:
                return refusals.busy(self._admission.line.retry_after_s(called_s))
            bound = self._table.begin(conversation_id, called_s, hints)
            if bound is not None:
                # Another turn of it was placed meanwhile, or a decoder had it still.
                return self._plan(bound.newest_turn, bound, None, router_id, True)
            shared_tokens = 0 if opening is None else self._table.held(opening)
            if over := self._gate.binding_over(tenant, turn1_tokens - shared_tokens):
                return self._over_limit(tenant, over)
            admitted = await self._admitted(pending, turn1_tokens, opening)
            conversation = self._table.get(conversation_id)
            while not pending.given_up and (
                conversation is None or conversation.decoder_id is None
            ):
                # Its decoder was lost between the binding and now.
                admitted = await self._admitted(pending, turn1_tokens, opening)
                conversation = self._table.get(conversation_id)
        except QueueFull as full:
            self._accounts.turned_away(conversation_id, "queue_full")
            return refusals.queue_full(full)
        except TimeoutError:
            self._accounts.turned_away(conversation_id, "timeout")
            retry_after_s = self._admission.line.retry_after_s(unix_s())
            return refusals.timed_out(turn1_tokens, self._settings.queue_timeout_s, retry_after_s)
        finally:
            self._settle(pending)
        if pending.given_up or conversation is None:
            await self.abandon(admitted.turn, None, None)
            return refusals.UNAVAILABLE
        self._accounts.metrics.queue_wait_s.observe(unix_s() - called_s)
        return self._plan(admitted.turn, conversation, admitted.placement.prefiller_id, router_id)

    async def forgo(self, conversation_id: str, claim: int) -> None:
        """Give up placing a turn for which `begin` answered `Unplaced`.

        Args:
            claim: that answer's; another turn of the conversation is left alone.
        """
        pending = self._pending.get(conversation_id)
        if pending is not None and pending.claim == claim:
            self._give_up(pending)

    def _give_up(self, pending: PendingTurn) -> None:
        if pending.granted is None:
            self._settle(pending)
        elif not pending.granted.done():
            # `place`, which waits for it, settles it: who is in line is always in `_pending`.
            self._admission.leave(pending.conversation_id)
            pending.granted.cancel()
        else:
            # There is room for it, and `place` does not know yet.
            pending.given_up = True

    async def prefilled(self, plan: TurnPlan, done: Prefilled | None) -> None:
        """Note that the remote prefill is over; ``done`` is None if it failed."""
        self._table.prefilled(plan.turn, 0 if done is None else done.prompt_tokens)
        self._accounts.prefilled(plan, done, goes_on=plan.turn in self._routers_of)

    async def advance(
        self, turn: TurnKey, decoder_id: str, stats: TurnStats, tails: tuple[Digest, ...]
    ) -> bool:
        """Note that a decoder completed a turn. Returns whether it still has the conversation."""
        self._turn_ends(turn, stats)
        if decoder_id not in self._registry.engines:
            # A new table: the decoder will register, with this turn among its holdings.
            return True
        if self._table.advance(turn, decoder_id, stats, tails, unix_s()):
            self._accounts.advanced(turn, stats, decoder_id)
        still_has = self._table.holds(turn, decoder_id)
        self._relieve(decoder_id)
        self._admit()
        return still_has

    async def abandon(self, turn: TurnKey, decoder_id: str | None, stats: TurnStats | None) -> None:
        """End a turn that did not complete."""
        if turn in self._routers_of:
            # Decoder and router may both tell of it.
            self._accounts.cut(turn, decoder_id, stats)
        self._turn_ends(turn, stats)
        if stats is not None:
            self._accounts.handed_off(stats)
        ended = self._table.abandon(turn, decoder_id, stats, unix_s())
        if ended is not None:
            self._has_ended(ended, "first_turn_failed")
        self._relieve(decoder_id)
        self._admit()

    async def observe(self, timing: TurnTiming) -> None:
        """Note how a turn ended, as its router saw it."""
        self._accounts.observed(timing)

    async def report_tool(self, conversation_id: str, report: ToolReport) -> int | Refusal | None:
        """Note that a conversation's tool begins, or is done.

        Returns:
            How many of it run now; None if the conversation is unknown.
        """
        await self._not_ready()
        found = self._table.histories(conversation_id)
        if not found:
            return None
        try:
            history = self._table.tools.meant(found, report)
            in_turn = bool(history.running)
            wall_s = self._table.tools.report(history.id, report, unix_s(), in_turn)
        except TooManyTools:
            return refusals.TOO_MANY_TOOLS
        self._accounts.tool_reported(history, report, wall_s)
        return sum(len(self._table.tools.running(one.id)) for one in found)

    async def release(self, conversation_id: str, reason: str = "released") -> bool:
        """End a conversation's histories; False if it is unknown. Its id is as it is kept."""
        await self._not_ready()
        found = self._table.histories(identity.conversation_of(conversation_id))
        told: set[str] = set()
        for history in found:
            self._table.release(history.id)
            self._has_ended(history, reason)
        self._forget()
        for history in found:
            told.update(self._table.notices.unconfirmed(history.id))
        self._admit()
        # From then on no decoder takes a turn of the old name for one of what has ended.
        await self._listeners.have_heard(told, _LOOK_S)
        return bool(found)

    # --- what can be asked -------------------------------------------------------------------

    async def router_beat(self, router_id: str) -> None:
        """Note that a router lives."""
        self._ensure_housekeeping()
        self._registry.router_beat(router_id, time.monotonic())

    async def health(self) -> dict[str, int]:
        """How many engines of each role are alive."""
        await self._not_ready()
        roles = [engine.role for engine in self._registry.engines.values()]
        return {"prefillers": roles.count("prefiller"), "decoders": roles.count("decoder")}

    async def engines(self, exact: bool = False) -> list[dict[str, Any]]:
        """The engines alive, for `GET /v1/engines`.

        Args:
            exact: whether what decoders have done just now counts; a turn does not wait for that.
        """
        await self._not_ready()
        if exact:
            await self._look()
        loads = self._registry.loads
        engines = self._registry.engines.values()
        return [engine_view(engine, self._table, loads.get(engine.id)) for engine in engines]

    async def conversation(self, conversation_id: str) -> dict[str, Any] | None:
        """One conversation, for `GET /v1/conversations/{id}`; the id is scoped to its tenant."""
        await self._not_ready()
        await self._look()
        found = self._table.histories(conversation_id)
        if not found:
            return None
        newest = self._events.newest_of(conversation_id, SHOWN_EVENTS)
        return conversation_view(found, unix_s(), self._table.tools, newest)

    async def events(self, *of: Any) -> EventPage:
        """What has happened, for `GET /v1/events`; see `listen`."""
        return await listen(self._events, *of)

    async def conversations(self, limit: int, tenant: str | None = None) -> bytes:
        """The most recently used conversations, for `GET /v1/conversations`, as JSON.

        Args:
            tenant: of this one alone; None: of all.
        """
        await self._not_ready()
        await self._look()
        table = self._table
        total = table.conversations
        if tenant is not None:
            usage = table.usage.tenants().get(tenant)
            total = 0 if usage is None else usage.conversations
        listed = await list_recent(table, limit, unix_s(), tenant)
        return b'{"object":"list","data":%b,"total":%d}' % (listed, total)

    async def metrics(self) -> bytes:
        """The metrics, in Prometheus' text format."""
        await self._look()
        return self._accounts.metrics.render()

    # --- tools, for the manager of environments -----------------------------------------------

    async def lifecycle(self, conversation_ids: list[str], pressure: HostPressure) -> Lifecycle:
        """How conversations stand, of which somebody keeps something; see `Lifecycle`.

        Args:
            conversation_ids: scoped to their tenants.
            pressure: of the machine on which their tools run.
        """
        self._host, self._host_told_s = pressure, time.monotonic()
        if not self._recovered.is_set() and time.monotonic() - self._started_s < RECOVERY_S:
            return Lifecycle(self._events.first, None)
        waiting = self._admission.line.tickets(unix_s())
        found = standings(conversation_ids, self._table, waiting, self._pending)
        return Lifecycle(self._events.first, found)

    async def note(self, kind: Kind, conversation_id: str, details: dict[str, Any]) -> None:
        """Something has happened to a conversation's tools."""
        self._events.add(kind, conversation_id, **details)

    # --- inside ------------------------------------------------------------------------------

    async def _not_ready(self) -> Refusal | None:
        if not self._recovered.is_set():
            left_s = self._started_s + RECOVERY_S - time.monotonic()
            if left_s > 0:
                # Perhaps not all come back: then those that did serve.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._recovered.wait(), left_s)
        return None if self._table.decoders else refusals.UNAVAILABLE

    def _complete(self) -> bool:
        """Whether all engines are known: those that a predecessor had, else those to start with."""
        wanted = self._autoscaler.wanted
        return all(
            self._registry.living_and_leaving(role)[0] >= wanted[role].scaling.replicas
            for role in wanted
        )

    def _plan(
        self,
        turn: TurnKey,
        conversation: Conversation,
        prefiller_id: str | None,
        router_id: str,
        later: bool = False,
    ) -> TurnPlan:
        """Where a turn that has just begun goes."""
        assert conversation.decoder_id is not None
        engines = self._registry.engines
        prefiller = engines.get(prefiller_id) if prefiller_id else None
        plan = TurnPlan(
            turn=turn,
            decoder_id=conversation.decoder_id,
            decoder_url=engines[conversation.decoder_id].url,
            prefiller_id=prefiller.id if prefiller else None,
            prefiller_url=prefiller.url if prefiller else None,
            later=later,
            root=None if later else conversation.root,
            points=b"" if later else conversation.points,
            # Under `per_turn` prefillers read the history from there.
            parks=self._settings.placement == "per_turn" or self._table.park(conversation),
            direct=self._settings.placement in _DIRECT,
        )
        self._under_way(turn, router_id, plan.decoder_id)
        self._accounts.turn_begins(plan)
        return plan

    def _under_way(self, turn: TurnKey, router_id: str, decoder_id: str) -> None:
        self._routers_of[turn], self._decoders_of[turn] = router_id, decoder_id

    def _turn_ends(self, turn: TurnKey, stats: TurnStats | None) -> None:
        self._routers_of.pop(turn, None)
        self._decoders_of.pop(turn, None)
        self._accounts.turn_ends(turn, stats)

    def _pend(
        self, conversation_id: str, router_id: str, chat: bool, claim: int | None = None
    ) -> PendingTurn:
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if claim is None:
            claim = next(self._claims)
        pending = PendingTurn(conversation_id, router_id, claim, settled, chat)
        self._pending[conversation_id] = pending
        self._gate.pends(pending)
        return pending

    def _settle(self, pending: PendingTurn) -> None:
        if self._pending.get(pending.conversation_id) is pending:
            del self._pending[pending.conversation_id]
        self._gate.settled(pending)
        pending.settle()

    def _over_limit(self, tenant: TurnTenant | None, over: Over) -> Refusal:
        assert tenant is not None
        self._accounts.over_limit(tenant.name, over)
        return refusals.over_limit(tenant.name, over)

    async def _admitted(
        self, pending: PendingTurn, turn1_tokens: int, opening: Opening | None
    ) -> Admitted:
        """Bind a conversation, now or when there is room.

        Raises:
            QueueFull: it may not even wait.
            TimeoutError: there was no room for too long.
            asyncio.CancelledError: it was given up meanwhile (`forgo`).
        """
        answer = self._admission.enter(
            pending.conversation_id, turn1_tokens, unix_s(), pending.arrived_s, opening
        )
        self._end_displaced()
        if isinstance(answer, Admitted):
            self._accounts.bound(answer)
            return answer
        self._accounts.waits(pending.conversation_id, turn1_tokens)
        granted: asyncio.Future[Admitted] = asyncio.get_running_loop().create_future()
        pending.granted = granted
        try:
            # Not wait_for, which on Python 3.12 can lose what comes at the moment in which its time
            # is up.
            await asyncio.wait([granted], timeout=self._settings.queue_timeout_s)
            if not granted.done():
                raise TimeoutError
            return granted.result()
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                # This call is being ended, and nobody else knows of the turn.
                await self.abandon(granted.result().turn, None, None)
            raise
        finally:
            pending.granted = None
            if not granted.done():
                self._admission.leave(pending.conversation_id)
            # The head may have gone: the next one may fit.
            self._admit()

    def _admit(self) -> None:
        for admitted in self._admission.admit(unix_s()):
            self._accounts.bound(admitted)
            granted = self._pending[admitted.conversation.id].granted
            assert granted is not None
            granted.set_result(admitted)
        self._end_displaced()

    def _relieve(self, decoder_id: str | None) -> None:
        memory = self._table.memory
        if decoder_id not in self._table.decoders:
            return
        self._accounts.look(decoder_id)
        if memory is None:
            return
        decoders = self._table.accepting_decoders
        memory.relieve(self._table.decoders[decoder_id], decoders, unix_s())
        self._forget()

    def _forget(self) -> None:
        memory = self._table.memory
        for one in () if memory is None else memory.take_forgotten():
            self._registry.note_forgotten(one.decoder_id, one.history_id, one.incarnation)

    def _end_displaced(self) -> None:
        for history in self._table.take_displaced():
            self._has_ended(history, "displaced")

    def _has_ended(self, conversation: Conversation, reason: str) -> None:
        self._accounts.ended(conversation, reason)
        self._registry.note_ended(conversation)

    # --- housekeeping ------------------------------------------------------------------------

    def _ensure_housekeeping(self) -> None:
        # Not in the constructor: Ray runs that outside of the actor's event loop.
        if self._housekeeping is None or self._housekeeping.done():
            self._housekeeping = asyncio.get_running_loop().create_task(self._keep_house())

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            try:
                await self._tidy(time.monotonic())
            except Exception:
                logger.exception("housekeeping failed; it goes on")

    async def _tidy(self, now_s: float) -> None:
        for conversation in self._table.expire(unix_s()):
            self._has_ended(conversation, "idle")
        for engine_id in self._registry.silent_engines(now_s):
            await self.engine_lost(engine_id, f"silent for {SILENCE_S:g} s")
        for router_id in self._registry.silent_routers(now_s):
            await self._router_lost(router_id)
        for decoder_id in list(self._table.decoders):
            self._relieve(decoder_id)
        if self._admission.observe(unix_s(), self._cpu_pressure(now_s)):
            self._accounts.window_moved()
        self._admit()
        self._scale(now_s)
        if now_s - self._registry.last_beat_s > ABANDONED_S:
            logger.info("no engine or router for %g s: ending", ABANDONED_S)
            ray.kill(ray.get_runtime_context().current_actor)

    def _cpu_pressure(self, now_s: float) -> float:
        """Of the machine that tools run on; 0 where none do, as far as is known."""
        told_lately = now_s - self._host_told_s <= SILENCE_S
        return self._host.cpu_pressure if told_lately and self._host.running_tools else 0.0

    def _scale(self, now_s: float) -> None:
        table = self._table
        waiting_tokens = self._admission.line.tokens
        changed = self._autoscaler.decide(
            table.decoders.values(), table.prefillers.values(), waiting_tokens, now_s
        )
        self._decided_s = unix_s()
        for role in changed:
            scaling = self._autoscaler.wanted[role].scaling
            logger.info("%ss: %d wanted (%s)", role, scaling.replicas, scaling.why)

    async def _router_lost(self, router_id: str) -> None:
        """Give back what a lost router had begun; decoders report the turns that got to them."""
        self._registry.remove_router(router_id)
        for pending in list(self._pending.values()):
            if pending.router_id == router_id:
                self._give_up(pending)
        for turn, router in list(self._routers_of.items()):
            if router == router_id:
                await self.abandon(turn, None, None)
        logger.warning("router %s is lost (silent for %g s)", router_id, SILENCE_S)
