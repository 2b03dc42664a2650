"""Energy: how much a GPU uses, whose it is, and how much a conversation took of it.

Pure: readings and times come in as arguments. A GPU's joules go to the engines on it, hence to
their role and phase: a prefiller's are cold prefills, a decoder's are the tail (the paper, §4.3).
Idle power counts as well: a GPU that waits for work is kept for its role.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from conserve.history import TurnKey

Key = TypeVar("Key", bound=Hashable)

PHASES = {"prefiller": "cold_prefill", "decoder": "tail"}
# An engine that has not reported its energy for so long is not expected to report again.
_STALE_S = 60.0


class EnergyMeter:
    """One GPU's energy since the first reading, in joules.

    It is read from the GPU's own counter; where there is none, it is integrated from power samples
    by the trapezoid rule (``integrated`` says so), which is as good as the samples are close.
    """

    def __init__(self) -> None:
        self.total_j = 0.0
        self.integrated = False
        self._counter_j: float | None = None
        self._sample: tuple[float, float] | None = None

    def read(self, now_s: float, counter_j: float | None, draw_w: float | None) -> float:
        """Take a reading; returns what was used since the last one, in joules.

        Args:
            counter_j: the GPU's counter; None if it has none, or does not answer.
            draw_w: the power that the GPU draws now; None if that is not known. Then nothing is
                assumed for the time up to the next sample.
        """
        used_j = 0.0
        if counter_j is not None:
            if self._counter_j is not None:
                # A counter that fell was started anew, with the driver.
                fell = counter_j < self._counter_j
                used_j = counter_j if fell else counter_j - self._counter_j
            self._counter_j = counter_j
        elif draw_w is not None and self._sample is not None and self._counter_j is None:
            then_s, then_w = self._sample
            used_j = (now_s - then_s) * (then_w + draw_w) / 2
            self.integrated = True
        self._sample = None if draw_w is None else (now_s, draw_w)
        self.total_j += used_j
        return used_j


class BusyShare(Generic[Key]):
    """Divides what an engine used among what ran on it: an estimate.

    Of the joules between two charges, the share of time in which anything ran is divided among what
    ran, by how long each did; the rest was used while idle. How hard each worked the GPU is not
    known.
    """

    def __init__(self, now_s: float) -> None:
        self.charged_s = now_s
        self._running: dict[Key, float] = {}
        self._spent_s: defaultdict[Key, float] = defaultdict(float)
        self._busy_s = 0.0
        self._busy_since_s = now_s

    def start(self, key: Key, now_s: float) -> None:
        """Note that what this key stands for runs from now on; one that runs already goes on."""
        if not self._running:
            self._busy_since_s = now_s
        self._running.setdefault(key, now_s)

    def stop(self, key: Key, now_s: float) -> None:
        """Note that what this key stands for has ended, if it was running."""
        since_s = self._running.pop(key, None)
        if since_s is None:
            return
        self._spent_s[key] += now_s - since_s
        if not self._running:
            self._busy_s += now_s - self._busy_since_s

    def charge(self, joules: float, now_s: float) -> dict[Key, float]:
        """Return what each key took of the joules since the last charge; less than all, if it was
        idle.
        """
        for key, since_s in self._running.items():
            self._spent_s[key] += now_s - since_s
            self._running[key] = now_s
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
        return {key: each_j * key_s for key, key_s in spent_s.items()}


@dataclass(frozen=True, slots=True)
class GpuReading:
    """Tells what one GPU does now; None where it does not say.

    Attributes:
        cap_w: the cap that ConServe holds on it; None: it holds none.
        refusal: why a cap that was wanted does not hold, as one word; empty where it does, or none
            was wanted.
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
    """Tells what an engine's GPUs have used, as its node says.

    Attributes:
        joules: the engine's share since ``epoch`` began.
        epoch: names a life of the node's actor; the next one counts from nothing again.
        integrated: some of it was integrated from power samples, for want of an energy counter.
        gpus: the GPUs that it runs on, as they were read last.
    """

    joules: float
    epoch: str
    integrated: bool = False
    gpus: tuple[GpuReading, ...] = ()


@dataclass(slots=True)
class MeteredEngine:
    """An engine that reports its GPUs' energy, and what it has reported last."""

    role: str
    tier: str
    latest: EngineEnergy
    shares: BusyShare[TurnKey]


@dataclass(slots=True)
class TierUse:
    """Tells what a tier has used, and computed meanwhile."""

    joules: float = 0.0
    tokens: int = 0

    @property
    def tokens_per_j(self) -> float | None:
        """Tokens computed for each joule; None before anything was used."""
        return self.tokens / self.joules if self.joules else None


class EnergyBook:
    """The application's energy: by role and tier, and each conversation's estimated share.

    Engines that report none cost nothing here, and count nowhere.

    Attributes:
        engines: the engines that report, by id.
        joules: energy used, by role and tier; that of engines that have gone is included.
        tiers: energy used, and tokens computed (prefilled rather than found in a cache, or decoded)
            by engines that report; by tier.
    """

    def __init__(self) -> None:
        self.engines: dict[str, MeteredEngine] = {}
        self.joules: defaultdict[tuple[str, str], float] = defaultdict(float)
        self.tiers: defaultdict[str, TierUse] = defaultdict(TierUse)
        # On which engine each turn runs.
        self._turns: dict[TurnKey, str] = {}

    @property
    def overall(self) -> TierUse:
        """All tiers together."""
        tiers = self.tiers.values()
        return TierUse(sum(tier.joules for tier in tiers), sum(tier.tokens for tier in tiers))

    def report(
        self, engine_id: str, role: str, tier: str, energy: EngineEnergy, now_s: float
    ) -> dict[tuple[str, int], float]:
        """An engine says what its GPUs have used.

        Returns:
            What conversations took of it since its last report, in joules, by id and incarnation.
        """
        engine = self.engines.get(engine_id)
        if engine is None:
            # What it used before that belongs to no turn that is known here.
            self.engines[engine_id] = MeteredEngine(role, tier, energy, BusyShare(now_s))
            return {}
        same = energy.epoch == engine.latest.epoch
        used_j = energy.joules - (engine.latest.joules if same else 0.0)
        engine.latest = energy
        self.joules[engine.role, engine.tier] += used_j
        self.tiers[engine.tier].joules += used_j
        taken: defaultdict[tuple[str, int], float] = defaultdict(float)
        for turn, joules in engine.shares.charge(used_j, now_s).items():
            taken[turn.history_id, turn.incarnation] += joules
        return dict(taken)

    def computed(self, engine_id: str, tokens: int) -> None:
        """An engine has prefilled or decoded so many tokens."""
        engine = self.engines.get(engine_id)
        if engine is not None:
            self.tiers[engine.tier].tokens += tokens

    def run(self, turn: TurnKey, engine_id: str, now_s: float) -> None:
        """A turn runs on an engine from now on, and nowhere else."""
        self.end(turn, now_s)
        engine = self.engines.get(engine_id)
        if engine is None:
            return
        if now_s - engine.shares.charged_s > _STALE_S:
            # It reports no more: nobody would ever ask for what piles up here.
            self.remove_engine(engine_id)
            return
        self._turns[turn] = engine_id
        engine.shares.start(turn, now_s)

    def end(self, turn: TurnKey, now_s: float) -> None:
        """A turn has ended, if it was running."""
        engine_id = self._turns.pop(turn, None)
        if engine_id is not None and engine_id in self.engines:
            self.engines[engine_id].shares.stop(turn, now_s)

    def remove_engine(self, engine_id: str) -> None:
        """An engine is lost, or has left; what it used stays counted."""
        if self.engines.pop(engine_id, None) is None:
            return
        for turn in [turn for turn, where in self._turns.items() if where == engine_id]:
            del self._turns[turn]


def divide(joules: float, engines: Sequence[str]) -> dict[str, float]:
    """Return what each of a GPU's engines is charged with: equal parts, whose sum is the whole.

    Most GPUs have one engine. Of several, the driver does not say which used how much.
    """
    parts = dict.fromkeys(engines, joules / len(engines)) if engines else {}
    if parts:
        parts[engines[-1]] = joules - sum(list(parts.values())[:-1])
    return parts
