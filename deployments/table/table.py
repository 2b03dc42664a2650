"""The conversation table's actor: the one authority for bindings, and for turns that wait for one.

Its state is soft. If the process dies, Ray starts it again. Engines notice at their next beat, and
tell it who they are and what they hold. Turns wait until all have, or for a while (`Recovery`).

What it decides is elsewhere and pure (see docs/architecture.md). What follows from an event is in
the files beside this one. This file has what other processes may call.
"""

import asyncio
import logging
import math
import operator
import time
from pathlib import Path
from typing import Any, cast

import msgspec
import ray

from autoscale.autoscaler import Others, make_autoscaler
from autoscale.capacity.served import engine_costs
from conserve import identity
from conserve.admission import Admission
from conserve.clock import unix_s
from conserve.conversations import ConversationTable
from conserve.direct import Notice, Report
from conserve.events import EventLog, Kind
from conserve.pausing import ToolReport, TooManyTools
from conserve.placement import make_policy
from conserve.placement.load import EngineLoad
from conserve.policies import room_policies
from conserve.recording import BLOCK_TOKENS
from conserve.settings import Settings
from conserve.turn import TurnKey, TurnStats
from conserve.wire import BEAT_S, NO_LACK, SILENCE_S, TURN_SILENCE_S, Lack
from deployments import answers, messages
from deployments.messages import SchedulerLoad
from deployments.table import lines, refusals
from deployments.table.accounts import Accounts
from deployments.table.membership import Membership, Recovery
from deployments.table.placing import Placing
from deployments.table.registry import Registry
from deployments.table.room import Room, TenantGate
from deployments.table.running import LOOK_S, Listeners, RunningTurns
from deployments.table.views import (
    SHOWN_EVENTS,
    cache_view,
    conversation_view,
    engine_view,
    list_recent,
    listen,
    standings,
)
from deployments.table_client import Table
from hetero.energy import EngineEnergy

logger = logging.getLogger("conserve.table")

# Without a beat from any engine or router for so long, the application is gone.
ABANDONED_S = 120.0
# A recorder waits this long for turns, and then asks again.
RECORDER_LOOKS, _LOOK_S = 20, 0.5
# Conversations that may wait for room. More than engines serve within the longest wait for it, and
# few enough for a look at all of them whenever room becomes free.
QUEUE_LIMIT = 1024


class TableService(Table):
    """The conversation table, an actor that `TableClient` calls; ``queue_limit`` turns may wait."""

    def __init__(self, settings: Settings, queue_limit: int = QUEUE_LIMIT) -> None:
        # In microseconds: above all ids of turns and events that an earlier table gave.
        first_id = time.time_ns() // 1000
        lines.log_in_session(settings.log.format, settings.slug)
        self._events = EventLog(unix_s, first_id, told=lines.log_event)
        policies = room_policies(
            settings.queue_timeout_s,
            pauses=settings.parks,
            disk=settings.lmcache.disk.path is not None,
        )
        self._table = ConversationTable(
            make_policy(settings.policy_name, settings.policy_number, engine_costs(settings)),
            settings.idle_timeout_s,
            TURN_SILENCE_S,
            first_id,
            policies.pausing,
            self._events,
        )
        self._model_id = settings.model_id
        profile = settings.profile and Path(settings.profile).name
        self._deployed: dict[str, Any] = {
            "placement": settings.policy_name, "parks": settings.parks, "profile": profile,
        }  # fmt: skip
        self._timeouts = messages.Timeouts(settings.queue_timeout_s, settings.idle_timeout_s)
        self._admission = Admission(
            self._table, queue_limit, settings.queue_timeout_s, policies.order, policies.window
        )
        self._autoscaler = make_autoscaler(settings)
        started_s = time.monotonic()
        self._registry = Registry(self._table, started_s)
        self._accounts = Accounts(
            self._table,
            self._admission,
            self._registry,
            self._autoscaler,
            self._events,
            settings.model_id,
        )
        self._recovery = Recovery(self._table, self._registry, self._autoscaler, started_s)
        gate = TenantGate(self._table, self._admission.queue)
        self._room = Room(self._table, self._admission, self._registry, self._accounts, gate)
        self._running = RunningTurns(
            settings, self._table, self._registry, self._accounts, self._room,
            may_be_stored=settings.lmcache.disk.path is not None,
        )  # fmt: skip
        self._listeners = Listeners(self._table, self._registry, self._running)
        self._placing = Placing(
            self._table,
            self._admission,
            self._registry,
            self._accounts,
            gate,
            self._listeners,
            self._room,
            self._running,
        )
        self._membership = Membership(
            self._table,
            self._registry,
            self._accounts,
            self._autoscaler,
            self._recovery,
            self._listeners,
            self._room,
            self._running,
        )
        # 0: nothing is decided. A predecessor's engines are still to say how many were wanted.
        self._decided_s = 0.0
        self._housekeeping: asyncio.Task[None] | None = None
        # What other models lacked when it was told, where they share GPUs.
        self._shares, self._others, self._others_told_s = settings.share_gpus, NO_LACK, started_s
        # The machine on which tools run, as it was described last.
        self._host = messages.HostPressure()
        self._host_told_s = started_s

    # --- engines -----------------------------------------------------------------------------

    async def engine_starting(self, engine: messages.EngineStarting) -> None:
        self._ensure_housekeeping()
        self._registry.start(engine, time.monotonic())

    async def register(self, engine: messages.EngineInfo) -> list[tuple[str, int]]:
        self._ensure_housekeeping()
        return self._membership.register(engine)

    async def beat(
        self,
        engine_id: str,
        energy: EngineEnergy | None = None,
        load: EngineLoad | None = None,
        scheduler: SchedulerLoad | None = None,
    ) -> messages.Heard | None:
        engine = self._registry.engine_beat(engine_id, time.monotonic())
        if engine is None:
            return None
        if energy is not None:
            self._accounts.charge(engine.info, energy)
        if load is not None:
            engine.load = load
            self._table.engine_says(engine_id, load, unix_s())
        if scheduler is not None:
            engine.scheduler = scheduler
        ended, engine.ended = engine.ended, []
        forgotten, engine.forgotten = engine.forgotten, []
        wanted = self._autoscaler.replicas(engine.info.role)
        memory = self._table.memory
        touched = [] if memory is None else memory.take_touched(engine_id)
        held = []
        if memory is not None and engine.scheduler is not None:
            held = memory.take_holds(engine_id, unix_s())
        holds = [(one.history_id, one.incarnation, one.for_s) for one in held]
        return messages.Heard(ended, wanted, self._decided_s, holds, touched, forgotten)

    async def engine_lost(self, engine_id: str, why: str) -> None:
        self._membership.lost(engine_id, why)

    async def leave(self, engine_id: str, overdue: bool) -> bool:
        # Turns that it has begun by itself may run.
        await self._listeners.have_heard({engine_id}, LOOK_S)
        return self._membership.leave(engine_id, overdue)

    async def left(self, engine_id: str) -> None:
        self._membership.left(engine_id)

    async def drain(self, engine_id: str) -> int | messages.Refusal | None:
        await self._recovery.not_ready()
        return self._membership.drain(engine_id)

    # --- decoders that begin turns by themselves ---------------------------------------------

    async def hear(self, decoder_id: str, registration: int, heard: int) -> Notice | None:
        return await self._listeners.hear(decoder_id, registration, heard)

    async def prefetched(self, history_id: str, tokens: int) -> None:
        self._table.prefetched(history_id, tokens, unix_s())

    async def report(self, decoder_id: str, registration: int, report: Report) -> bool | None:
        return self._listeners.report(decoder_id, registration, report)

    async def _look(self) -> None:
        """Wait until all that decoders had done by now is known, or for a while."""
        await self._listeners.have_heard(self._table.notices.decoders, LOOK_S)

    # --- turns -------------------------------------------------------------------------------

    async def begin(
        self, asked: messages.BeginTurn
    ) -> messages.TurnPlan | messages.Uncounted | messages.Refusal:
        if refusal := await self._recovery.not_ready():
            return refusal
        return await self._placing.begin(asked)

    async def cancel(self, router_id: str, number: int) -> None:
        self._placing.cancel(router_id, number)

    async def prefilled(self, plan: messages.TurnPlan, done: TurnStats | None) -> None:
        self._running.prefilled(plan, done)

    async def abandon(self, turn: TurnKey) -> None:
        self._running.abandon(turn, None, None)

    async def observe(self, turn: TurnKey | None, stats: TurnStats) -> None:
        self._accounts.observed(turn, stats)
        if turn is not None:
            self._running.unsent.pop(turn, None)

    async def report_tool(
        self, conversation_id: str, report: ToolReport
    ) -> int | messages.Refusal | None:
        await self._recovery.not_ready()
        found = self._table.histories(conversation_id)
        if not found:
            return None
        try:
            history = self._table.tools.meant(found, report)
            wall_s = self._table.tools.report(history.id, report, unix_s(), bool(history.running))
        except TooManyTools:
            return refusals.TOO_MANY_TOOLS
        self._accounts.tool_reported(history, report, wall_s)
        running = self._table.tools.running(history.id)
        if report.ended and not running and not self._admission.queue:
            self._table.prefetch(history, unix_s())
        return sum(len(self._table.tools.running(one.id)) for one in found)

    async def release(self, conversation_id: str, reason: str = "released") -> bool:
        await self._recovery.not_ready()
        conversation = identity.conversation_of(conversation_id)
        found = self._table.histories(conversation)
        # Files outlive what the table knows.
        for engine in self._registry.engines.values():
            engine.forgotten.append(conversation)
        told: set[str] = set()
        for history in found:
            self._table.release(history.id)
            self._room.has_ended(history, reason)
        self._room.forget()
        for history in found:
            told.update(self._table.notices.unconfirmed(history.id))
        self._room.admit()
        # After this, no decoder takes a turn of this id for one of a history that has ended.
        await self._listeners.have_heard(told, LOOK_S)
        return bool(found)

    # --- what can be asked -------------------------------------------------------------------

    async def router_beat(
        self, router_id: str, timeouts: messages.Timeouts | None = None, others: Lack | None = None
    ) -> messages.RouterHeard:
        self._ensure_housekeeping()
        if others is not None:
            self._others, self._others_told_s = others, time.monotonic()
        if timeouts is not None and timeouts != self._timeouts:
            self._timeouts = timeouts
            self._admission.queue.timeout_s = timeouts.queue_timeout_s
            self._table.end_when_idle_for(timeouts.idle_timeout_s)
            logger.info("changed in place: %s", timeouts)
        self._registry.router_beat(router_id, time.monotonic())
        can_serve = True if self._table.decoders else False if self._recovery.is_over else None
        encoders, counters = self._registry.encoders(), self._registry.counters()
        return messages.RouterHeard(
            encoders, counters, can_serve, self._autoscaler.lacks or NO_LACK
        )

    async def health(self) -> answers.Alive:
        await self._recovery.not_ready()
        roles = [engine.role for engine in self._registry.infos]
        starting = self._registry.starting(time.monotonic())
        wants_encoders = "encoder" in self._autoscaler.wanted
        return answers.Alive(
            roles.count("prefiller"),
            roles.count("decoder"),
            starting or msgspec.UNSET,
            roles.count("encoder") if wants_encoders else msgspec.UNSET,
        )

    async def engines(self, exact: bool = False) -> list[answers.Engine]:
        await self._recovery.not_ready()
        if exact:
            await self._look()
        return [engine_view(one, self._table) for one in self._registry.engines.values()]

    async def conversation(self, conversation_id: str) -> answers.Conversation | None:
        await self._recovery.not_ready()
        await self._look()
        newest = self._events.newest_of(conversation_id, SHOWN_EVENTS)
        why = self._accounts.why
        return conversation_view(conversation_id, self._table, unix_s(), why, newest)

    async def events(self, query: messages.EventQuery) -> messages.EventPage:
        return await listen(self._events, query)

    async def conversations(self, limit: int, tenant: str | None = None) -> bytes:
        await self._recovery.not_ready()
        await self._look()
        table = self._table
        total = table.conversations
        if tenant is not None:
            usage = table.usage.tenants().get(tenant)
            total = 0 if usage is None else usage.conversations
        listed = await list_recent(table, limit, unix_s(), self._accounts.why, tenant)
        # A long list is encoded in slices, so that it stops nothing else.
        data = cast(list[answers.Conversation], msgspec.Raw(listed))
        return msgspec.json.encode(answers.Conversations(data, total))

    async def cache(self, minutes: int, tenant: str | None = None) -> answers.Cache:
        await self._look()
        spent = self._accounts.cache.spent(minutes, unix_s(), tenant)
        return cache_view(spent, minutes, self._model_id)

    async def recording(self, after: int, tenant: str | None = None) -> answers.Recording:
        of = self._accounts.recording
        for _ in range(RECORDER_LOOKS):
            newest, turns = of.after(after, unix_s(), tenant)
            if turns or not after:
                break
            await asyncio.sleep(_LOOK_S)
        dropped = of.dropped.total() if tenant is None else of.dropped[tenant]
        told = operator.attrgetter("role", "hosts", "capacity_tokens", "host_tokens")
        engines, hosts = [*map(told, self._registry.infos)], self._registry.hosts
        deployed = self._deployed | {"engines": engines, "nodes": len(hosts)}
        return answers.Recording(self._model_id, BLOCK_TOKENS, dropped, deployed, newest, turns)

    async def metrics(self) -> bytes:
        await self._look()
        return self._accounts.render_metrics()

    # --- for what runs conversations' tools --------------------------------------------------

    async def lifecycle(
        self, conversation_ids: list[str], pressure: messages.HostPressure
    ) -> messages.Lifecycle:
        self._host, self._host_told_s = pressure, time.monotonic()
        if not self._recovery.is_over:
            return messages.Lifecycle(self._events.first, None)
        waiting = self._admission.queue.tickets(unix_s())
        found = standings(conversation_ids, self._table, waiting, self._room.pending)
        return messages.Lifecycle(self._events.first, found)

    async def note(self, kind: Kind, conversation_id: str, details: dict[str, Any]) -> None:
        self._events.add(kind, conversation_id, **details)

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
        for history in self._table.expire(unix_s()):
            self._room.has_ended(history, "idle")
        for engine_id in self._registry.silent_engines(now_s):
            await self.engine_lost(engine_id, f"silent for {SILENCE_S:g} s")
        for router_id in self._registry.silent_routers(now_s):
            await self._router_lost(router_id)
        for decoder_id in list(self._table.decoders):
            self._room.relieve(decoder_id)
        if self._admission.observe(unix_s(), self._cpu_pressure(now_s)):
            self._accounts.window_moved()
        self._accounts.log_late(now_s)
        self._membership.move_drained()
        self._table.prefetch_due(unix_s(), bool(self._admission.queue))
        self._room.admit()
        self._scale(now_s)
        if now_s - self._registry.last_beat_s > ABANDONED_S:
            logger.info("no engine or router for %g s: ending", ABANDONED_S)
            ray.kill(ray.get_runtime_context().current_actor)

    def _cpu_pressure(self, now_s: float) -> float:
        """Return the pressure on the machine that tools run on; 0: none run, or it is unknown."""
        told_lately = now_s - self._host_told_s <= SILENCE_S
        return self._host.cpu_pressure if told_lately and self._host.running_tools else 0.0

    def _scale(self, now_s: float) -> None:
        table = self._table
        waiting_tokens = self._admission.queue.tokens
        others = self._sharing(now_s) if self._shares else None
        changed = self._autoscaler.decide(
            table.decoders.values(), table.prefillers.values(), waiting_tokens, now_s, others
        )
        self._decided_s = unix_s()
        for role in changed:
            scaling = self._autoscaler.wanted[role].scaling
            logger.info("%ss: %d wanted (%s)", role, scaling.replicas, scaling.why)

    def _sharing(self, now_s: float) -> Others:
        """Note what this model lacks, and return what others do."""
        registry, autoscaler = self._registry, self._autoscaler
        counts = {role: registry.living_and_leaving(role) for role in autoscaler.wanted}
        there = {role: living - leaving for role, (living, leaving) in counts.items()}
        # Serve may have ended one that never told.
        starts_within_s = 3 * (registry.start_s or math.inf)
        starting = sum(now_s - began_s < starts_within_s for began_s in registry.began_s.values())
        autoscaler.lack(there, starting, now_s)
        lack = self._others if now_s - self._others_told_s <= SILENCE_S else NO_LACK
        autoscaler.pays_after_s = registry.start_s or autoscaler.pays_after_s
        used_tokens = self._table.used_tokens(unix_s() - autoscaler.pays_after_s)
        return Others(lack, used_tokens, {role: leaving for role, (_, leaving) in counts.items()})

    async def _router_lost(self, router_id: str) -> None:
        self._registry.remove_router(router_id)
        self._placing.router_lost(router_id)
        self._running.router_lost(router_id)
        logger.warning("router %s is lost (silent for %g s)", router_id, SILENCE_S)
