"""Tells metrics, listeners, the autoscaler and the account of energy what happens."""

import math
import time
from dataclasses import InitVar, dataclass

from autoscale.autoscaler import Autoscaler
from conserve import identity
from conserve.admission import Admission, Admitted
from conserve.admission.admission import Why
from conserve.cache_account import CacheAccount
from conserve.clock import unix_s
from conserve.conversations import ConversationTable
from conserve.costs import SpaceTimeCosts
from conserve.direct import is_direct
from conserve.events import EventLog
from conserve.history import History
from conserve.pausing import ToolReport
from conserve.recording import Recording
from conserve.tenants.limits import Over
from conserve.turn import TurnKey, TurnStats
from conserve.why import noted, why_slow
from deployments.messages import EngineInfo, TurnPlan
from deployments.table import lines
from deployments.table.engine_metrics import ENERGY, ENGINES, SCHEDULERS
from deployments.table.metrics import APPLICATION, TABLE, Metrics, Rows
from deployments.table.registry import Registry
from deployments.table.tenant_metrics import TENANTS, TenantCounts
from hetero.energy import EnergyBook, EngineEnergy

# Names in the event of a turn's end, and of the record's fields.
_AT_END = (
    *lines.COMPUTED,
    *((name, name) for name in ("engine_wait_s", "engine_wait_for", "kept_tokens", "kept_s")),
)

# A decoder reports a turn's end within milliseconds of its router; see `Accounts.observed`.
_LATE_S = 5.0


@dataclass(eq=False)
class Accounts:
    """Keeps account of events, by a method each; it changes nothing of where a history goes.

    Attributes:
        metrics: what `/metrics` renders.
        cache: sums of what turns had computed, and why.
        recording: what a recorder gets of turns, while there is one.
        why: of each live history whose last turn was slow for a known reason, that reason.
        unlogged: turns whose clients had all before their decoders have told of the end, and when.
    """

    table: ConversationTable
    admission: Admission
    registry: Registry
    autoscaler: Autoscaler
    events: EventLog
    model_id: InitVar[str]

    def __post_init__(self, model_id: str) -> None:
        self._energy = EnergyBook()
        self.costs: SpaceTimeCosts = SpaceTimeCosts()
        self._tenants = TenantCounts(self.table.usage)
        self.cache = CacheAccount()
        self.recording = Recording()
        self.why: dict[str, str] = {}
        self.unlogged: dict[TurnKey, tuple[float, TurnStats]] = {}
        self.metrics = Metrics(
            Rows(TABLE, self),
            Rows(ENGINES, self.registry),
            Rows(SCHEDULERS, self.registry),
            Rows(ENERGY, self._energy),
            Rows(TENANTS, self._tenants),
            Rows(APPLICATION, model_id),
        )

    def render_metrics(self) -> bytes:
        self.look()
        return self.metrics.render()

    def bound(self, admitted: Admitted) -> None:
        if not admitted.newly_bound:
            return
        placement = admitted.placement
        parent = self.table.parents.parent(identity.conversation_of(admitted.history.id))
        self.events.add(
            "place", admitted.history.id, decoder=placement.decoder_id,
            prefiller=placement.prefiller_id, tokens=admitted.prompt_tokens,
            new=not admitted.known, moved=admitted.moved or None,
            parent=None if parent is None else identity.own_id(parent),
        )  # fmt: skip
        self.metrics.moves.inc(admitted.moved)
        if not admitted.known:
            self.autoscaler.conversation_bound(time.monotonic())
        if placement.prefiller_id is not None:
            self.autoscaler.prompt_sent(admitted.prompt_tokens, time.monotonic())

    def waits(self, history_id: str, tokens: int) -> Why:
        """Note that a turn waits for room; returns why it does."""
        decoders = self.table.accepting_decoders
        missing = min(
            (one.held_tokens + tokens - one.capacity_tokens for one in decoders), default=0
        )
        ahead, why = self.admission.ahead(history_id, unix_s())
        self._tenants.begins(identity.tenant_of(history_id))
        self.events.add(
            "wait", history_id, why=why, tokens=tokens, ahead=ahead,
            missing_tokens=max(0, missing), decoders=len(decoders),
        )  # fmt: skip
        return why

    def has_waited(self, turn: TurnKey, wait_s: float, why: Why) -> None:
        """Note that a turn that has just begun had waited for room."""
        record = self.table.record(turn.turn_id)
        if record is not None:
            record.room_s, record.room_why = wait_s, why

    def window_moved(self) -> None:
        window = self.admission.window
        assert window is not None
        self.events.add(
            "window", limit=None if window.limit == math.inf else window.limit,
            active=self.table.active(unix_s()), kv_pressure=round(window.pressure.kv, 3),
            cpu_pressure=round(window.pressure.cpu, 3),
            tool_pressure=round(window.pressure.tools, 3),
        )  # fmt: skip

    def turned_away(self, history_id: str, code: str) -> None:
        self.events.add("refuse", history_id, code=code)
        self.metrics.refusals.labels(code).inc()

    def turn_begins(self, plan: TurnPlan) -> None:
        self.events.add(
            "start", plan.turn.history_id, turn=plan.turn.turn_id, decoder=plan.decoder_id,
            prefiller=plan.prefiller_id, later=plan.later or None,
        )  # fmt: skip
        if plan.later:
            way = "direct" if is_direct(plan.turn.turn_id) else "asked"
            self.metrics.later_turns.labels(way).inc()
        self._tenants.begins(identity.tenant_of(plan.turn.history_id))
        now_s = time.monotonic()
        self._energy.run(plan.turn, plan.prefiller_id or plan.decoder_id, now_s)
        history = self.table.get(plan.turn.history_id)
        if history is not None:
            self.look(plan.decoder_id)
            # Of several turns at once the first has what the history holds.
            tokens = history.held_tokens if len(history.running) == 1 else 0
            self.costs.begin(plan.turn, plan.decoder_id, tokens, history.last_tokens, now_s)

    def turn_ends(self, turn: TurnKey, stats: TurnStats | None = None) -> None:
        """A turn has ended, however it did."""
        engine_id = self._energy.end(turn, time.monotonic())
        self.costs.end(turn, stats, time.monotonic())
        # Without a record the turn began under a table that was lost.
        known = self.table.record(turn.turn_id) or TurnStats(unbound="unknown")
        if stats is not None:
            self._tenants.spent(identity.tenant_of(turn.history_id), stats)
            known.merge(stats)
        known.prefill_j += self._energy.prefilled(engine_id, known.engine_prefill_s)
        self.cache.add(turn.history_id, known, unix_s())
        history = self.table.get(turn.history_id)
        self.recording.note(
            turn, unix_s(), known if known.began_s else stats,
            background=history is not None and history.background,
            parent=self.table.parents.parent(identity.conversation_of(turn.history_id)),
        )  # fmt: skip

    def look(self, decoder_id: str | None = None) -> None:
        """Note how much a decoder holds from now on; None: all of them."""
        ids = self.table.decoders if decoder_id is None else [decoder_id]
        for one in ids:
            if (decoder := self.table.decoders.get(one)) is not None:
                self.costs.look(one, decoder.held_tokens, time.monotonic())

    def prefilled(self, plan: TurnPlan, done: TurnStats | None, *, goes_on: bool) -> None:
        """Note that a remote prefill is over; ``done`` is None if it failed.

        ``goes_on`` is whether the turn has not ended meanwhile, and runs on its decoder now.
        """
        if goes_on:
            self._energy.run(plan.turn, plan.decoder_id, time.monotonic())
        self.events.add(
            "prefilled", plan.turn.history_id, turn=plan.turn.turn_id,
            prefiller=plan.prefiller_id, failed=done is None or None,
            tokens=None if done is None else done.prefilled_tokens,
            loaded_tokens=None if done is None else done.prefiller_lmcache_tokens,
        )  # fmt: skip
        record = self.table.record(plan.turn.turn_id)
        if record is not None:
            record.remote_prefill_s = max(0.0, unix_s() - record.began_s)
            record.prefill_failed = done is None
        if done is None:
            self.metrics.cold_prefill_failures.inc()
            return
        if record is not None:
            record.merge(done)
            record.prefill_j = self._energy.prefilled(plan.prefiller_id, done.prefiller_s)
        self._tenants.prefilled(identity.tenant_of(plan.turn.history_id), done.remote_tokens)
        self.metrics.prefiller_loaded_tokens.inc(done.prefiller_lmcache_tokens)
        if plan.prefiller_id is not None:
            computed_tokens = done.prefilled_tokens - done.prefiller_lmcache_tokens
            self._energy.computed(plan.prefiller_id, computed_tokens)
        if plan.later:
            self.metrics.later_prefills.inc()
        else:
            self.metrics.cold_prefills.inc()
            self.metrics.cold_prefill_tokens.inc(done.prefilled_tokens)

    def advanced(self, turn: TurnKey, stats: TurnStats, decoder_id: str) -> None:
        self.admission.queue.served(turn.history_id, stats.computed_tokens)
        stats.why = why = why_slow(stats) if stats.began_s else None
        if why is None:
            self.why.pop(turn.history_id, None)
        else:
            self.why[turn.history_id] = why
        self._log_observed(turn, why)
        said = {name: getattr(stats, field) for name, field in _AT_END}
        said |= {f"{stage}_s": took_s for stage, took_s in stats.stages_s.items()}
        rounded = {
            name: round(value, 3) if isinstance(value, float) else value
            for name, value in said.items()
        }
        self.events.add(
            "end", turn.history_id, turn=turn.turn_id, decoder=decoder_id, **rounded, why=why,
            note=noted(stats),
        )  # fmt: skip
        self._energy.computed(
            decoder_id, stats.prompt_tokens - stats.found_tokens + stats.output_tokens
        )
        self.metrics.completed(stats)

    def cut(self, turn: TurnKey, decoder_id: str | None, stats: TurnStats | None) -> None:
        """A turn did not complete; without ``stats``, nothing was done for it."""
        self.why.pop(turn.history_id, None)
        tokens = 0 if stats is None else stats.computed_tokens
        self.admission.queue.served(turn.history_id, tokens)
        self._log_observed(turn)
        self.events.add(
            "cut", turn.history_id, turn=turn.turn_id, decoder=decoder_id,
            output_tokens=None if stats is None else stats.output_tokens,
        )  # fmt: skip

    def observed(self, turn: TurnKey | None, stats: TurnStats) -> None:
        """Note how a turn's client was served; ``turn`` is None if it was bound nowhere."""
        ttfet_s: float | None = None
        self._log(turn, stats)
        if turn is not None:
            if stats.effective_ago_s is not None:
                ttfet_s = self.table.answered(turn, unix_s() - stats.effective_ago_s)
            at_s = unix_s() - stats.latency_s
            self.recording.note(turn, unix_s(), stats, at=at_s, ttfet_s=ttfet_s)
            self.events.add(
                "answered", turn.history_id, turn=turn.turn_id,
                outcome=stats.outcome, latency_s=round(stats.latency_s, 4),
                ttft_s=None if stats.ttft_s is None else round(stats.ttft_s, 4),
                ttfet_s=None if ttfet_s is None else round(ttfet_s, 4),
            )  # fmt: skip
        if stats.tenant is not None:
            self._tenants.turn(stats.tenant, stats.outcome or "failed")
        self.metrics.observed(stats, ttfet_s)

    def _log(self, turn: TurnKey | None, stats: TurnStats) -> None:
        """Write a turn's line, or have that wait for its decoder's report, which tells why."""
        history = None if turn is None else self.table.get(turn.history_id)
        if turn is not None and history is not None:
            if stats.outcome == "completed" and history.finished < turn.turn_id:
                self.unlogged[turn] = time.monotonic(), stats
                return
            if history.finished == turn.turn_id:
                stats.why = self.why.get(history.id)
        lines.log_turn(turn, stats)

    def _log_observed(self, turn: TurnKey, why: str | None = None) -> None:
        if turn in self.unlogged:
            _, stats = self.unlogged.pop(turn)
            stats.why = why
            lines.log_turn(turn, stats)

    def log_late(self, now_s: float) -> None:
        """Write the lines of turns whose decoders have not reported their ends in time."""
        for turn, (since_s, _) in list(self.unlogged.items()):
            if now_s - since_s < _LATE_S:
                break  # So are those after it.
            self._log_observed(turn)

    def tool_reported(self, history: History, report: ToolReport, wall_s: float | None) -> None:
        self.events.add(
            "tool_end" if report.ended else "tool_start", history.id, tool=report.tool,
            call_id=report.call_id, wall_s=None if wall_s is None else round(wall_s, 3),
        )  # fmt: skip

    def over_limit(self, tenant: str, over: Over) -> None:
        self._tenants.refused(tenant, over.limit)

    def ended(self, history: History, reason: str) -> None:
        self.events.add("ended", history.id, reason=reason)
        self.why.pop(history.id, None)
        self.metrics.ended.labels(reason).inc()
        last = history.last_turn
        if last is not None:
            self.autoscaler.conversation_ended(
                max(0.0, unix_s() - history.created_s), last.prompt_tokens + last.output_tokens
            )

    def charge(self, engine: EngineInfo, energy: EngineEnergy) -> None:
        """An engine says what its GPUs have used; conversations get their shares of it."""
        taken = self._energy.report(engine.id, engine.role, engine.tier, energy, time.monotonic())
        for (history_id, incarnation), joules in taken.items():
            self.table.used_energy(history_id, incarnation, joules)

    def engine_ready(self, engine: EngineInfo) -> None:
        if engine.hosts:
            self.costs.add(engine.id, engine.capacity_tokens, time.monotonic())
            self.look(engine.id)
        self.events.add(
            "engine_ready", engine=engine.id, role=engine.role,
            capacity_tokens=engine.capacity_tokens,
        )  # fmt: skip

    def engine_gone(self, engine: EngineInfo, unbound: int, why: str | None = None) -> None:
        """Note that an engine has left, or is lost, and how many histories that unbinds."""
        lost = why is not None
        self.events.add(
            "engine_lost" if lost else "engine_left", engine=engine.id, role=engine.role, why=why,
            unbound=unbound,
        )  # fmt: skip
        self._energy.remove_engine(engine.id)
        self.costs.remove(engine.id)
        if lost:
            self.metrics.engines_lost.labels(engine.role).inc()
