"""Meters GPU energy, and shares it among engines, roles and conversations. Pure.

A GPU's joules go to its engines, hence to their role and phase: a prefiller's to cold prefills, a
decoder's to the tail (ConServe, section 4.3), and an encoder's to encoding. Idle power counts,
since a waiting GPU is kept for its role.
"""

from collections import defaultdict
from dataclasses import dataclass

from conserve.turn import TurnKey

PHASES = {"encoder": "encode", "prefiller": "cold_prefill", "decoder": "tail"}
# An engine that has not reported its energy for this long is not expected to report again.
_STALE_S = 60.0


class EnergyMeter:
    """Meters one GPU's energy.

    Without an energy counter, it integrates power samples by the trapezoid rule and sets
    ``integrated``.
    """

    def __init__(self) -> None:
        self.integrated = False
        self._counter_j: float | None = None
        self._sample: tuple[float, float] | None = None

    def read(self, now_s: float, counter_j: float | None, draw_w: float | None) -> float:
        """Take a reading, and return the joules used since the last one.

        Args:
            counter_j: the GPU's own counter; None if it does not answer.
            draw_w: the power drawn now; None: not known, and no energy counts until the next
                sample.
        """
        used_j = 0.0
        if counter_j is not None:
            if self._counter_j is not None:
                # A lower counter means that the driver was reloaded and counts from zero.
                fell = counter_j < self._counter_j
                used_j = counter_j if fell else counter_j - self._counter_j
            self._counter_j = counter_j
        elif draw_w is not None and self._sample is not None and self._counter_j is None:
            then_s, then_w = self._sample
            used_j = (now_s - then_s) * (then_w + draw_w) / 2
            self.integrated = True
        self._sample = None if draw_w is None else (now_s, draw_w)
        return used_j


class BusyShare:
    """Estimates each turn's part of an engine's energy.

    The joules of the time in which anything ran are divided by how long each turn ran. The rest was
    used while idle.
    """

    def __init__(self, now_s: float) -> None:
        self.charged_s = now_s
        self._running: dict[TurnKey, float] = {}
        self._spent_s: defaultdict[TurnKey, float] = defaultdict(float)
        self._busy_s = 0.0
        self._busy_since_s = now_s

    def start(self, turn: TurnKey, now_s: float) -> None:
        if not self._running:
            self._busy_since_s = now_s
        self._running.setdefault(turn, now_s)

    def stop(self, turn: TurnKey, now_s: float) -> None:
        since_s = self._running.pop(turn, None)
        if since_s is None:
            return
        self._spent_s[turn] += now_s - since_s
        if not self._running:
            self._busy_s += now_s - self._busy_since_s

    def charge(self, joules: float, now_s: float) -> dict[TurnKey, float]:
        """Return each turn's part of the joules since the last charge; less than all if idle."""
        for turn, since_s in self._running.items():
            self._spent_s[turn] += now_s - since_s
            self._running[turn] = now_s
        if self._running:
            self._busy_s += now_s - self._busy_since_s
            self._busy_since_s = now_s
        spent_s, self._spent_s = self._spent_s, defaultdict(float)
        busy_s, self._busy_s = self._busy_s, 0.0
        elapsed_s = now_s - self.charged_s
        self.charged_s = now_s
        all_s = sum(spent_s.values())
        if all_s <= 0 or elapsed_s <= 0:
            return {}
        each_j = joules * min(1.0, busy_s / elapsed_s) / all_s
        return {turn: each_j * turn_s for turn, turn_s in spent_s.items()}


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One GPU's state; None where the driver does not say.

    ``cap_w`` is the cap that ConServe holds, ``refusal`` one word on why a wanted cap does not
    hold.
    """

    uuid: str
    name: str
    draw_w: float | None
    limit_w: float | None
    utilisation: float | None
    temperature_c: int | None
    cap_w: float | None = None
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class EngineEnergy:
    """Joules of an engine's GPUs since ``epoch`` began: a life of its node's actor.

    ``integrated`` if some were integrated from power samples, for want of an energy counter.
    """

    joules: float
    epoch: str
    integrated: bool = False
    gpus: tuple[GpuReading, ...] = ()


@dataclass(slots=True)
class MeteredEngine:
    """An engine that reports its energy.

    Attributes:
        ran_j, ran_s: joules and seconds between reports, of those in which turns ran.
        prefill_j, prefill_s: sums of prefills; the seconds of several at once are added up.
    """

    role: str
    tier: str
    latest: EngineEnergy
    shares: BusyShare
    ran_j: float = 0.0
    ran_s: float = 0.0
    prefill_j: float = 0.0
    prefill_s: float = 0.0


@dataclass(slots=True)
class TierUse:
    joules: float = 0.0
    tokens: int = 0

    @property
    def tokens_per_j(self) -> float | None:
        """Tokens computed per joule; None before any energy was used."""
        return self.tokens / self.joules if self.joules else None


class EnergyBook:
    """The application's energy, and each conversation's estimated share.

    Attributes:
        engines: the engines that report, by id. Others do not count.
        joules: by role and tier; includes engines that have left.
        tiers: energy, and tokens prefilled (not found in a cache) or decoded, by tier.
    """

    def __init__(self) -> None:
        self.engines: dict[str, MeteredEngine] = {}
        self.joules: defaultdict[tuple[str, str], float] = defaultdict(float)
        self.tiers: defaultdict[str, TierUse] = defaultdict(TierUse)
        # On which engine each turn runs.
        self._turns: dict[TurnKey, str] = {}

    @property
    def overall(self) -> TierUse:
        tiers = self.tiers.values()
        return TierUse(sum(tier.joules for tier in tiers), sum(tier.tokens for tier in tiers))

    def report(
        self, engine_id: str, role: str, tier: str, energy: EngineEnergy, now_s: float
    ) -> dict[tuple[str, int], float]:
        """Return conversations' joules since the engine's last report, by id and incarnation."""
        engine = self.engines.get(engine_id)
        if engine is None:
            # Energy used before the first report belongs to no known turn.
            self.engines[engine_id] = MeteredEngine(role, tier, energy, BusyShare(now_s))
            return {}
        same = energy.epoch == engine.latest.epoch
        used_j = energy.joules - (engine.latest.joules if same else 0.0)
        engine.latest = energy
        self.joules[engine.role, engine.tier] += used_j
        self.tiers[engine.tier].joules += used_j
        taken: defaultdict[tuple[str, int], float] = defaultdict(float)
        since_s = engine.shares.charged_s
        for turn, joules in engine.shares.charge(used_j, now_s).items():
            taken[turn.history_id, turn.incarnation] += joules
        if taken:
            engine.ran_j += used_j
            engine.ran_s += now_s - since_s
        return dict(taken)

    def prefilled(self, engine_id: str | None, took_s: float | None) -> float:
        """Return joules of a prefill that has ended, by its seconds; 0: not known.

        Its power is the engine's mean while turns ran, divided among prompts computed at once. All
        prefills of an engine have at most what the engine used.
        """
        engine = self.engines.get(engine_id or "")
        if engine is None or not took_s or not engine.ran_s:
            return 0.0
        engine.prefill_s += took_s
        used_j = took_s * engine.ran_j / max(engine.ran_s, engine.prefill_s)
        used_j = min(used_j, engine.ran_j - engine.prefill_j)
        engine.prefill_j += used_j
        return used_j

    def computed(self, engine_id: str, tokens: int) -> None:
        engine = self.engines.get(engine_id)
        if engine is not None:
            self.tiers[engine.tier].tokens += tokens

    def run(self, turn: TurnKey, engine_id: str, now_s: float) -> None:
        """Note that a turn now runs on this engine, and nowhere else."""
        self.end(turn, now_s)
        engine = self.engines.get(engine_id)
        if engine is None:
            return
        if now_s - engine.shares.charged_s > _STALE_S:
            # The engine no longer reports, so no charge would ever clear its running times.
            self.remove_engine(engine_id)
            return
        self._turns[turn] = engine_id
        engine.shares.start(turn, now_s)

    def end(self, turn: TurnKey, now_s: float) -> str | None:
        """Note that a turn has ended; returns on which engine, if that reports."""
        engine_id = self._turns.pop(turn, None)
        if engine_id is not None and engine_id in self.engines:
            self.engines[engine_id].shares.stop(turn, now_s)
        return engine_id

    def remove_engine(self, engine_id: str) -> None:
        """Forget a lost or leaving engine; the energy it used stays counted."""
        if self.engines.pop(engine_id, None) is None:
            return
        for turn in [turn for turn, where in self._turns.items() if where == engine_id]:
            del self._turns[turn]
