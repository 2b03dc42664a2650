"""The conversation table's actor: the one authority for bindings, and who waits for one.

Its state is soft. If the process dies, Ray starts it again and the engines, which notice at
their next beat, tell it who they are and what they hold; turns wait until all have, or for
``RECOVERY_S``. See docs/architecture.md.
"""

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass
from typing import Any

import msgspec
import ray

from autoscale.configured import make_autoscaler
from conserve import identity
from conserve.admission.waiting import QueueFull, WaitingLine
from conserve.clock import unix_s
from conserve.conversations import (
    Conversation,
    ConversationTable,
    TurnStats,
)
from conserve.metrics import Metrics, ReplicaCounts
from conserve.placement import Placement
from conserve.recognition import Digest
from conserve.settings import Settings
from conserve.wire import BEAT_S, SILENCE_S
from deployments.messages import (
    EngineInfo,
    Heard,
    Prefilled,
    Refusal,
    TurnPlan,
    TurnTiming,
    Unplaced,
)
from hetero.energy import EnergyBook, EngineEnergy
from hetero.metrics import EnergyMetrics

logger = logging.getLogger("conserve.table")

# Longest time from `begin` to `place`, for counting tokens, and from room to binding.
PLACING_S = 30.0
# How long a new table waits for engines to report before it takes bindings for unknown.
RECOVERY_S = 8.0
# Without a beat from any engine or router for so long, the application is gone.
ABANDONED_S = 120.0


class TableService:
    """What the actor does; `connect` makes it one."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._table = ConversationTable(
            settings.policy(),
            settings.idle_timeout_s,
            settings.turn_timeout_s,
            # Above whatever a predecessor handed out, without having kept it.
            first_id=time.time_ns() // 1_000_000,
        )
        self._line = WaitingLine(settings.queue_limit, settings.queue_timeout_s)
        self._metrics = Metrics(self._table, self._line, self._replica_counts)
        self._autoscaler = make_autoscaler(settings)
        self._energy = EnergyBook()
        self._metrics.add(EnergyMetrics(self._energy))
        self._engines: dict[str, EngineInfo] = {}
        self._beats: dict[str, float] = {}
        self._routers: dict[str, float] = {}
        self._ended: dict[str, list[tuple[str, int]]] = {}
        # What a router that dies leaves behind: turns by their id, and conversations being placed.
        self._turns: dict[int, _Claim] = {}
        self._placers: dict[str, str] = {}
        # Conversations between `begin` and their binding: a second turn of one waits for it.
        self._placing: dict[str, asyncio.Future[None]] = {}
        # Those in line: who is to be told, and when their first request came.
        self._waiters: dict[str, asyncio.Future[Placement]] = {}
        self._came_s: dict[str, float] = {}
        self._started_s = time.monotonic()
        # Not yet: a predecessor's engines are still to say how many were wanted.
        self._decided_s = 0.0
        self._last_beat_s = self._started_s
        self._recovered = asyncio.Event()
        self._housekeeping: asyncio.Task[None] | None = None

    # --- engines -----------------------------------------------------------------------------

    async def register(self, engine: EngineInfo) -> list[tuple[str, int]]:
        """An engine is ready. Returns conversations (and incarnations) that it is to forget."""
        self._ensure_housekeeping()
        now_s = time.monotonic()
        forget: list[tuple[str, int]] = []
        if engine.role == "prefiller":
            self._table.add_prefiller(engine.id)
        else:
            sent = {held.id: held.incarnation for held in engine.holds}
            foreign = self._table.add_decoder(engine.id, engine.capacity_tokens, engine.holds)
            forget = [(conversation_id, sent[conversation_id]) for conversation_id in foreign]
            self._ended.setdefault(engine.id, [])
        if engine.leaving:
            self._table.leave(engine.id)
        if engine.wanted_replicas is not None and now_s - self._started_s <= SILENCE_S:
            # A predecessor has wanted so many, and they are there.
            self._autoscaler.adopt(engine.role, engine.wanted_replicas, now_s)
        self._engines[engine.id] = engine
        self._beats[engine.id] = now_s
        logger.info("%s %s is ready at %s", engine.role, engine.id, engine.url)
        if self._complete():
            self._recovered.set()
        self._admit()
        return forget

    async def beat(self, engine_id: str, energy: EngineEnergy | None = None) -> Heard | None:
        """An engine lives. Returns what it has to know, or None: register again.

        Args:
            energy: what its GPUs have used, where that is known.
        """
        self._last_beat_s = time.monotonic()
        engine = self._engines.get(engine_id)
        if engine is None:
            return None
        if energy is not None:
            self._charge(self._engines[engine_id], energy)
        self._beats[engine_id] = self._last_beat_s
        ended = self._ended.get(engine_id, [])
        self._ended[engine_id] = []
        return Heard(ended, self._autoscaler.replicas(engine.role), self._decided_s)

    async def engine_lost(self, engine_id: str, why: str) -> None:
        """An engine is dead."""
        engine = self._engines.get(engine_id)
        if engine is None:
            return
        self._metrics.engines_lost.labels(engine.role).inc()
        unbound = self._remove(engine)
        logger.warning(
            "%s %s is lost (%s); %d conversations will be prefilled again on their next turn",
            engine.role, engine_id, why, len(unbound),
        )  # fmt: skip

    async def leave(self, engine_id: str, overdue: bool) -> bool:
        """An engine is to go: it gets nothing new.

        Args:
            overdue: its time to drain is up: conversations are unbound once no turn of theirs runs.

        Returns:
            Whether it should stay and ask again, because of what it has.
        """
        engine = self._engines.get(engine_id)
        if engine is None:
            # A new table, with which it has not registered yet; or it was lost.
            return not overdue
        if not self._table.is_leaving(engine_id):
            self._table.leave(engine_id)
            logger.info("%s %s is leaving", engine.role, engine_id)
        if not self._routers and time.monotonic() - self._started_s > SILENCE_S:
            # They belong to a new deployment, with a table of its own: no turn comes here.
            return False
        if engine.role == "prefiller":
            return self._table.prefillers[engine_id].queued_tokens > 0 and not overdue
        if overdue or not self._table.accepting_decoders:
            # With no other decoder the application ends, as a rule. Or the others have died: then
            # turns that run are not cut, and the rest is prefilled again once there is another.
            unbound = self._table.evict(engine_id)
            if unbound:
                logger.info(
                    "decoder %s leaves: %d conversations will be prefilled again elsewhere",
                    engine_id, len(unbound),
                )  # fmt: skip
            self._admit()
        return self._table.decoders[engine_id].conversations > 0

    async def left(self, engine_id: str) -> None:
        """An engine that was leaving ends now."""
        engine = self._engines.get(engine_id)
        if engine is not None:
            unbound = self._remove(engine)
            logger.info(
                "%s %s has left, with %d conversations", engine.role, engine_id, len(unbound)
            )

    def _remove(self, engine: EngineInfo) -> list[str]:
        """Forget an engine; ids of the conversations that were bound to it."""
        del self._engines[engine.id]
        self._energy.remove_engine(engine.id)
        self._beats.pop(engine.id, None)
        self._ended.pop(engine.id, None)
        if engine.role == "prefiller":
            self._table.remove_prefiller(engine.id)
            return []
        return self._table.remove_decoder(engine.id)

    async def engines(self) -> list[dict[str, Any]]:
        """Those alive, for `GET /v1/engines`."""
        await self._not_ready()
        described = []
        for engine in self._engines.values():
            decoder = self._table.decoders.get(engine.id)
            prefiller = self._table.prefillers.get(engine.id)
            described.append(
                {
                    "id": engine.id,
                    "role": engine.role,
                    "url": engine.url,
                    "pid": engine.pid,
                    "leaving": self._table.is_leaving(engine.id),
                    "capacity_tokens": engine.capacity_tokens,
                    "max_batched_tokens": engine.max_batched_tokens,
                    "held_tokens": decoder.held_tokens if decoder else None,
                    "conversations": decoder.conversations if decoder else None,
                    "queued_tokens": prefiller.queued_tokens if prefiller else None,
                    "tier": engine.tier,
                    "gpus": list(engine.gpus),
                }
            )
        return described

    # --- turns -------------------------------------------------------------------------------

    async def begin(
        self, router_id: str, explicit_id: str | None, candidates: list[Digest]
    ) -> TurnPlan | Unplaced | Refusal:
        """Start a turn: where its conversation is bound, or that it has to be placed."""
        if refusal := await self._not_ready():
            return refusal
        conversation_id = explicit_id or self._table.recognise(candidates) or identity.new_id()
        while (placing := self._placing.get(conversation_id)) is not None:
            # A router that died in between never settles it.
            await asyncio.wait([placing], timeout=self._settings.queue_timeout_s + PLACING_S)
            if not placing.done():
                self._settle(conversation_id)
        conversation = self._table.begin(conversation_id, unix_s())
        if conversation is not None:
            prefiller_id = self._table.prefill_later_turn(conversation)
            return self._plan(conversation, prefiller_id, router_id, later=True)
        counter = self._tokenizer()
        if counter is None:
            return _UNAVAILABLE
        self._placing[conversation_id] = asyncio.get_running_loop().create_future()
        self._placers[conversation_id] = router_id
        return Unplaced(conversation_id, counter.url, counter.id, counter.max_model_len)

    async def place(
        self, router_id: str, conversation_id: str, turn1_tokens: int, waited_s: float = 0.0
    ) -> TurnPlan | Refusal:
        """Bind a conversation for which `begin` answered `Unplaced`; waits for room.

        Args:
            waited_s: since its first request came.
        """
        arrived_s = time.monotonic()
        came_s = unix_s() - waited_s
        if conversation_id in self._waiters:
            # Both were told `Unplaced`, the second when the first had seemed lost.
            self._settle(conversation_id)
            return Refusal(
                429,
                "another turn of this conversation is still waiting for room; send one at a time",
                "conversation_busy",
                self._line.retry_after_s(arrived_s),
            )
        bound = self._table.begin(conversation_id, unix_s())
        if bound is not None:
            # This table was lost between the two calls, and a decoder had it still.
            self._settle(conversation_id)
            return self._plan(bound, None, router_id, later=True)
        try:
            placement = await self._bind_or_wait(conversation_id, turn1_tokens, came_s)
            conversation = self._table.get(conversation_id)
            while conversation is None or conversation.decoder_id is None:
                # Its decoder was lost between the binding and now.
                placement = await self._bind_or_wait(conversation_id, turn1_tokens, came_s)
                conversation = self._table.get(conversation_id)
        except QueueFull as full:
            self._metrics.refusals.labels("queue_full").inc()
            return Refusal(429, str(full), "queue_full", full.retry_after_s)
        except TimeoutError:
            self._metrics.refusals.labels("timeout").inc()
            return Refusal(
                429,
                f"no decoder had room for {turn1_tokens} tokens within "
                f"{self._settings.queue_timeout_s:g} s; try again later",
                "queue_timeout",
                self._line.retry_after_s(time.monotonic()),
            )
        finally:
            self._settle(conversation_id)
        self._metrics.queue_wait_s.observe(time.monotonic() - arrived_s)
        return self._plan(conversation, placement.prefiller_id, router_id)

    async def forgo(self, conversation_id: str) -> None:
        """The turn for which `begin` answered `Unplaced` is not to be placed any more."""
        waiter = self._waiters.get(conversation_id)
        if waiter is not None and not waiter.done():
            waiter.cancel()
        self._settle(conversation_id)

    async def prefilled(self, plan: TurnPlan, done: Prefilled | None) -> None:
        """The remote prefill is over; None: it failed."""
        self._table.prefilled(plan.conversation_id, plan.incarnation)
        if plan.turn_id in self._turns:
            self._energy.run(
                plan.turn_id, plan.conversation_id, plan.incarnation, plan.decoder_id,
                time.monotonic(),
            )  # fmt: skip
        if done is None:
            self._metrics.cold_prefill_failures.inc()
            return
        self._metrics.prefiller_loaded_tokens.inc(done.lmcache_tokens)
        if plan.prefiller_id is not None:
            self._energy.computed(plan.prefiller_id, done.prompt_tokens - done.lmcache_tokens)
        if plan.later:
            self._metrics.later_prefills.inc()
        else:
            self._metrics.cold_prefills.inc()
            self._metrics.cold_prefill_tokens.inc(done.prompt_tokens)

    async def advance(
        self,
        conversation_id: str,
        incarnation: int,
        turn_id: int,
        decoder_id: str,
        stats: TurnStats,
        tails: tuple[Digest, ...],
    ) -> bool:
        """A decoder has completed a turn. Returns whether the conversation is still its own."""
        self._turns.pop(turn_id, None)
        self._energy.end(turn_id, time.monotonic())
        if decoder_id not in self._engines:
            # A new table: the decoder will register, with this turn among its holdings.
            return True
        if self._table.advance(
            conversation_id, incarnation, turn_id, decoder_id, stats, tails, unix_s()
        ):
            self._count(stats, decoder_id)
        self._admit()
        return self._table.holds(conversation_id, incarnation, decoder_id)

    async def abandon(
        self,
        conversation_id: str,
        incarnation: int,
        turn_id: int,
        decoder_id: str | None,
        stats: TurnStats | None,
    ) -> None:
        """A turn ended without completing."""
        self._turns.pop(turn_id, None)
        self._energy.end(turn_id, time.monotonic())
        if stats is not None:
            self._count_handoff(stats)
        ended = self._table.abandon(
            conversation_id, incarnation, turn_id, decoder_id, stats, unix_s()
        )
        if ended is not None:
            self._has_ended(ended, "first_turn_failed")
        self._admit()

    async def observe(self, timing: TurnTiming) -> None:
        """A router saw a turn end."""
        metrics = self._metrics
        metrics.turns.labels(timing.outcome).inc()
        if timing.outcome != "refused":
            metrics.turn_latency_s.observe(timing.latency_s)
        if timing.ttft_s is not None:
            metrics.ttft_s.observe(timing.ttft_s)
        for gap_s in timing.tbt_s:
            metrics.tbt_s.observe(gap_s)
        if timing.effective_ago_s is not None:
            ttfet_s = self._table.answered(
                timing.conversation_id, timing.incarnation, unix_s() - timing.effective_ago_s
            )
            if ttfet_s is not None:
                metrics.ttfet_s.observe(ttfet_s)

    async def release(self, conversation_id: str, reason: str = "released") -> bool:
        """End a conversation; False if it is unknown."""
        await self._not_ready()
        conversation = self._table.release(conversation_id)
        if conversation is None:
            return False
        self._has_ended(conversation, reason)
        self._admit()
        return True

    # --- what can be asked -------------------------------------------------------------------

    async def router_beat(self, router_id: str) -> None:
        """A router lives."""
        self._ensure_housekeeping()
        self._last_beat_s = self._routers[router_id] = time.monotonic()

    async def health(self) -> dict[str, int]:
        """How many engines of each role are alive."""
        await self._not_ready()
        return {
            "prefillers": len(self._table.prefillers),
            "decoders": len(self._table.decoders),
        }

    async def conversation(self, conversation_id: str) -> dict[str, Any] | None:
        """One conversation, for `GET /v1/conversations/{id}`."""
        await self._not_ready()
        found = self._table.get(conversation_id)
        return None if found is None else _described(found)

    async def conversations(self, limit: int) -> dict[str, Any]:
        """The latest used ones, for `GET /v1/conversations`."""
        await self._not_ready()
        return {
            "object": "list",
            "data": [_described(found) for found in self._table.recent(limit)],
            "total": len(self._table),
        }

    async def metrics(self) -> bytes:
        """Prometheus text."""
        return self._metrics.render()

    # --- inside ------------------------------------------------------------------------------

    async def _not_ready(self) -> Refusal | None:
        if not self._recovered.is_set():
            left_s = self._started_s + RECOVERY_S - time.monotonic()
            if left_s > 0:
                # Not all may come back: then those that did serve.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._recovered.wait(), left_s)
        return None if self._table.decoders else _UNAVAILABLE

    def _complete(self) -> bool:
        """Whether all engines that a predecessor had are known; of itself, those to start with."""
        return all(
            len(known) >= self._autoscaler.replicas(tier)
            for tier, known in (
                ("decoder", self._table.decoders),
                ("prefiller", self._table.prefillers),
            )
            if tier in self._autoscaler.wanted
        )

    def _tokenizer(self) -> EngineInfo | None:
        """The engine to count a prompt: the prefiller that will likely see it, or a decoder."""
        prefillers = self._table.accepting_prefillers
        decoders = self._table.accepting_decoders
        if prefillers:
            return self._engines[min(prefillers, key=lambda p: p.queued_tokens).id]
        if decoders:
            return self._engines[min(decoders, key=lambda d: d.conversations).id]
        return None

    def _plan(
        self,
        conversation: Conversation,
        prefiller_id: str | None,
        router_id: str,
        later: bool = False,
    ) -> TurnPlan:
        assert conversation.decoder_id is not None
        self._turns[conversation.running[-1]] = _Claim(
            router_id, conversation.id, conversation.incarnation
        )
        prefiller = self._engines.get(prefiller_id) if prefiller_id else None
        self._energy.run(
            conversation.running[-1],
            conversation.id,
            conversation.incarnation,
            prefiller.id if prefiller else conversation.decoder_id,
            time.monotonic(),
        )
        return TurnPlan(
            conversation_id=conversation.id,
            incarnation=conversation.incarnation,
            turn_id=conversation.running[-1],
            decoder_id=conversation.decoder_id,
            decoder_url=self._engines[conversation.decoder_id].url,
            prefiller_id=prefiller.id if prefiller else None,
            prefiller_url=prefiller.url if prefiller else None,
            later=later,
        )

    async def _bind_or_wait(self, conversation_id: str, tokens: int, came_s: float) -> Placement:
        if not self._line:
            placement = self._bind(conversation_id, tokens, came_s)
            if placement is not None:
                return placement
        self._line.join(conversation_id, tokens, time.monotonic())
        self._came_s[conversation_id] = came_s
        waiter = self._waiters[conversation_id] = asyncio.get_running_loop().create_future()
        try:
            return await asyncio.wait_for(waiter, self._settings.queue_timeout_s)
        finally:
            self._waiters.pop(conversation_id, None)
            self._came_s.pop(conversation_id, None)
            self._line.leave(conversation_id)
            # The head may have gone: the next one may fit.
            self._admit()

    def _bind(self, conversation_id: str, tokens: int, came_s: float) -> Placement | None:
        bound = self._table.begin(conversation_id, unix_s())
        if bound is not None and bound.decoder_id is not None:
            # It waited for room, and the decoder that was thought lost is back with it.
            return Placement(bound.decoder_id, None)
        placement = self._table.bind(conversation_id, tokens, unix_s(), came_s)
        if placement is not None:
            conversation = self._table.get(conversation_id)
            if conversation is not None and conversation.moves:
                self._metrics.moves.inc()
            else:
                self._autoscaler.conversation_bound(time.monotonic())
            if placement.prefiller_id is not None:
                self._autoscaler.prompt_sent(tokens, time.monotonic())
        return placement

    def _admit(self) -> None:
        while (head := self._line.head()) is not None:
            waiter = self._waiters.get(head.key)
            if waiter is None or waiter.done():
                self._line.leave(head.key)
                continue
            placement = self._bind(head.key, head.tokens, self._came_s[head.key])
            if placement is None:
                return
            self._line.leave(head.key)
            waiter.set_result(placement)

    def _settle(self, conversation_id: str) -> None:
        self._placers.pop(conversation_id, None)
        placing = self._placing.pop(conversation_id, None)
        if placing is not None and not placing.done():
            placing.set_result(None)

    def _charge(self, engine: EngineInfo, energy: EngineEnergy) -> None:
        taken = self._energy.report(engine.id, engine.role, engine.tier, energy, time.monotonic())
        for (conversation_id, incarnation), joules in taken.items():
            self._table.used_energy(conversation_id, incarnation, joules)

    def _count(self, stats: TurnStats, decoder_id: str) -> None:
        found = stats.decoder_cached_tokens + stats.lmcache_tokens
        self._energy.computed(decoder_id, stats.prompt_tokens - found + stats.output_tokens)
        metrics = self._metrics
        metrics.prompt_tokens.inc(stats.prompt_tokens)
        metrics.cached_tokens.inc(stats.decoder_cached_tokens)
        metrics.output_tokens.inc(stats.output_tokens)
        self._count_handoff(stats)

    def _count_handoff(self, stats: TurnStats) -> None:
        if stats.lmcache_tokens:
            self._metrics.handoffs.inc()
            self._metrics.handoff_tokens.inc(stats.lmcache_tokens)

    def _has_ended(self, conversation: Conversation, reason: str) -> None:
        self._metrics.ended.labels(reason).inc()
        last = conversation.last_turn
        if last is not None:
            self._autoscaler.conversation_ended(
                max(0.0, unix_s() - conversation.created_s), last.prompt_tokens + last.output_tokens
            )
        if conversation.decoder_id in self._ended:
            self._ended[conversation.decoder_id].append((conversation.id, conversation.incarnation))

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
        for engine_id, beat_s in list(self._beats.items()):
            if now_s - beat_s > SILENCE_S:
                await self.engine_lost(engine_id, f"silent for {SILENCE_S:g} s")
        for router_id, beat_s in list(self._routers.items()):
            if now_s - beat_s > SILENCE_S:
                await self._router_lost(router_id)
        self._admit()
        self._scale(now_s)
        if now_s - self._last_beat_s > ABANDONED_S:
            logger.info("no engine or router for %g s: ending", ABANDONED_S)
            ray.kill(ray.get_runtime_context().current_actor)

    def _scale(self, now_s: float) -> None:
        table = self._table
        changed = self._autoscaler.decide(
            table.decoders.values(), table.prefillers.values(), self._line.tokens, now_s
        )
        self._decided_s = unix_s()
        for tier in changed:
            scaling = self._autoscaler.wanted[tier].scaling
            logger.info("%ss: %d wanted (%s)", tier, scaling.replicas, scaling.why)

    def _replica_counts(self) -> dict[str, ReplicaCounts]:
        counts: dict[str, ReplicaCounts] = {}
        for tier, wanted in self._autoscaler.wanted.items():
            engines = [engine.id for engine in self._engines.values() if engine.role == tier]
            leaving = sum(map(self._table.is_leaving, engines))
            need = wanted.need
            counts[tier] = ReplicaCounts(
                len(engines) - leaving,
                leaving,
                wanted.scaling.replicas,
                None if need is None else need.replicas,
                None if need is None else need.signal,
            )
        return counts

    async def _router_lost(self, router_id: str) -> None:
        """Give back what it had begun; decoders report the turns that had got to them."""
        del self._routers[router_id]
        for conversation_id, placer in list(self._placers.items()):
            if placer == router_id:
                await self.forgo(conversation_id)
        for turn_id, claim in list(self._turns.items()):
            if claim.router_id == router_id:
                await self.abandon(claim.conversation_id, claim.incarnation, turn_id, None, None)
        logger.warning("router %s is lost (silent for %g s)", router_id, SILENCE_S)


@dataclass(frozen=True, slots=True)
class _Claim:
    """A turn under way, and the router that asked for it."""

    router_id: str
    conversation_id: str
    incarnation: int


_UNAVAILABLE = Refusal(
    503, "no engine is ready to serve; try again shortly", "unavailable", retry_after_s=5
)


def _described(conversation: Conversation) -> dict[str, Any]:
    now_s = unix_s()
    last = conversation.last_turn
    return {
        "id": conversation.id,
        "object": "conversation",
        "phase": conversation.phase,
        "turns": conversation.turns,
        "held_tokens": conversation.held_tokens,
        "decoder": conversation.decoder_id,
        "moves": conversation.moves,
        "ttfet_s": None if conversation.ttfet_s is None else round(conversation.ttfet_s, 4),
        "created": int(conversation.created_s),
        "age_s": round(max(0.0, now_s - conversation.created_s), 3),
        "last_used": int(conversation.last_used_s),
        "idle_s": round(max(0.0, now_s - conversation.last_used_s), 3),
        "last_turn": None if last is None else msgspec.structs.asdict(last),
        "energy_estimate_j": round(conversation.energy_j, 3) if conversation.energy_j else None,
    }
