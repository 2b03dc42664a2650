"""Chooses which idle histories give up their room, and in which order."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import exp2

from conserve.hints import BACKGROUND
from conserve.pausing.times import Gaps

# A turn that comes within this time comes soon: about as long as a long prefill takes.
_SOON_S = 30.0
# How long an engine may be told to hold a history's KV between turns, and the least of it.
_HOLDS_S = (2.0, 4.0, 8.0, 16.0, 32.0, 60.0)
# The share of those that come back within the longest time, and are back by then.
_HELD_SHARE = 0.9
# A prompt of this length takes twice as long to prefill as without attention. It only orders
# histories of different lengths.
_ATTENTION_TOKENS = 32_768
# The time to take a token from host memory, as a share of the time to compute it. By published
# figures for an 8B model on an H100 it is from 0.38 (short prompts) to 0.17 (64k tokens).
_RELOAD = 0.25

Leads = Mapping[str | None, float]
"""Tokens, by weight, by which tenants were served more than another; or less, if below 0.

Those that are level with it are left out.
"""
LEVEL_TOKENS = 8_192
"""Tenants are level up to this lead, so that they do not take room from each other turn by turn."""


def patience_s(timeout_s: float) -> float:
    """Return `Pausing.patience_s`, five times `Levels.rise_s`, of turns that may wait so long."""
    return min(50.0, timeout_s * 5 / 6)


@dataclass(frozen=True, slots=True)
class Idle:
    """An idle history on a decoder.

    Attributes:
        freed_tokens: what comes free when it goes, since it is not shared.
        left_tokens: what the engine should still have of it.
        idle_s: since its last turn ended, or its client's last report on a tool (`RunningTools`).
        still_idle: how many others that wait for the same are idle for at least half as long.
        parked_tokens: what is in host memory too, and will be for `Pausing.kept_s`.
        tool: see `Gaps.add`.
        background: whether its turns wait for others'; so pausing it costs less.
        waits: whether it waits for conversations that it began.
        taken_up: whether it has answered the one that began it, for good.
        lead: its tenant's, over that of the prompt that needs room (`Leads`).
    """

    id: str
    held_tokens: int
    freed_tokens: int
    left_tokens: int
    idle_s: float
    still_idle: int = 0
    parked_tokens: int = 0
    tool: str | None = None
    tool_ended: bool = False
    background: bool = False
    waits: bool = False
    taken_up: bool = False
    lead: float = 0.0


@dataclass(frozen=True, slots=True)
class Pausing:
    """Pauses idle histories in the order of the expected cost of each token that this frees.

    The cost is the time to compute or reload what the engine has of a history, times the chance
    that it comes back soon (`Gaps`). Equally likely ones go by length, the short first, as in
    ThunderAgent (equations 8 to 11), but recomputation grows with n + n^2 / 32768, not n^2.

    While turns run, a new prompt takes the room only of histories that are *away* (unlikely to be
    back soon, or lost to their engine) or parked. Taking others' room makes more be computed again
    than is gained (docs/lab/pausing.md). Unlike in ThunderAgent (equation 7), idle time is not
    discounted before a pause, and only as many are paused as necessary: a pause by itself costs
    nothing.

    Args:
        mark: the share of a decoder's capacity (lambda_max) above which idle histories are paused.
        away_chance: a history with a lower chance to be back soon is away.
        park_mark: the share of its decoder's capacity from which on a turn may park its KV; 0: all
            turns do, as a disk keeps what host memory evicts.
        kept_s: KV that host memory keeps for a shorter time counts as not parked.
        patience_s: a paused history that is back waits at most this long for others to be away.
        resumes: gaps from the reported end of a tool to the next turn.
    """

    mark: float = 1.0
    away_chance: float = 0.2
    park_mark: float = 0.5
    kept_s: float = 60.0
    patience_s: float = 50.0
    gaps: Gaps = field(default_factory=Gaps)
    resumes: Gaps = field(default_factory=Gaps)

    def order(self, idle: Iterable[Idle]) -> list[Idle]:
        return sorted(idle, key=self.cost)

    def cost(self, one: Idle) -> float:
        """Return the expected cost of each token that it frees; it has no unit."""
        return self.price(one) / max(1, one.freed_tokens)

    def price(self, one: Idle) -> float:
        reloaded = min(one.left_tokens, one.parked_tokens)
        computed = one.left_tokens - reloaded
        computed_for = computed * (1.0 + one.held_tokens / _ATTENTION_TOKENS)
        cost = (computed_for + _RELOAD * reloaded) * self._chance(one)
        # What is away goes before the longest served tenant's, and that before others'.
        cost *= exp2(max(-5.0, min(5.0, -one.lead / LEVEL_TOKENS)))
        return BACKGROUND * cost if one.background else cost

    def is_away(self, one: Idle) -> bool:
        """Return whether it is unlikely to be back soon, or would find less than half of itself."""
        if 2 * one.left_tokens < one.held_tokens or one.taken_up:
            return True
        of_all = self.gaps.chance(one.idle_s, _SOON_S, one.still_idle)
        return max(of_all, self._chance(one)) < self.away_chance

    def may_go(self, one: Idle) -> bool:
        """Return whether a new prompt may take its room.

        It is away, or costs a reload at most, or waits for others, whose end brings it back. Or its
        tenant was served more than the prompt's.
        """
        parked = 2 * one.parked_tokens >= one.held_tokens
        return one.lead > 0 or one.waits or parked or self.is_away(one)

    def parks(self, occupancy: float, engine_s: float, host_s: float) -> bool:
        """Return whether a turn leaves its KV in host memory, which keeps it for longer.

        Args:
            occupancy: of its decoder.
            engine_s, host_s: how long ago the oldest KV was used that is left in its engine, and in
                host memory; infinite while host memory evicts nothing.
        """
        outlives = host_s > engine_s or not self.park_mark
        return occupancy >= self.park_mark and outlives

    def hold_s(self, tool: str | None) -> float:
        """Return how long an engine should hold a history's KV for its next turn.

        That is until nine in ten of those that come within a minute are back; 0 if less than half
        of all come.
        """
        back = [self.gaps.chance(0.0, within_s, tool=tool) for within_s in _HOLDS_S]
        if back[-1] < 0.5:
            return 0.0
        return next(
            hold_s
            for hold_s, share in zip(_HOLDS_S, back, strict=True)
            if share >= _HELD_SHARE * back[-1]
        )

    def excess_tokens(self, held_tokens: int, capacity_tokens: int) -> int:
        return max(0, held_tokens - int(self.mark * capacity_tokens))

    def _chance(self, one: Idle) -> float:
        if one.taken_up:
            return 0.0
        if one.tool_ended:
            return self.resumes.chance(one.idle_s, _SOON_S, one.still_idle)
        return self.gaps.chance(one.idle_s, _SOON_S, one.still_idle, one.tool)
