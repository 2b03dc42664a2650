"""Turns needed replicas into wanted ones, by bounds, hysteresis and a cool-down.

Scaling up is immediate. Scaling down waits until the need has stayed low, and until some time after
the last change.
"""

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Limits:
    """The settings by which a role scales."""

    least: int
    most: int
    target: float = 0.7  # The highest utilisation after a change.
    up_at: float = 0.85  # Above this utilisation there are too few replicas.
    down_at: float = 0.5  # Below it there are too many.
    down_delay_s: float = 60.0  # How long there have to be too many before any is removed.
    cool_down_s: float = 60.0  # How long after a change none is removed.

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ValueError(f"replicas from {self.least} to {self.most}: give 1 <= least <= most")
        if not 0 < self.down_at < self.target < self.up_at <= 1:
            raise ValueError(
                f"down_at {self.down_at:g}, target {self.target:g}, up_at {self.up_at:g}: "
                "give 0 < down_at < target < up_at <= 1"
            )


@dataclass(frozen=True, slots=True)
class Scaling:
    """A decision: when the number last changed, and since when fewer would do."""

    replicas: int
    changed_s: float | None = None
    low_since_s: float | None = None
    why: str = "start"


def scale(limits: Limits, before: Scaling, needed: float | None, now_s: float) -> Scaling:
    """Decide how many replicas to run.

    ``needed`` replicas would just suffice at full use; None changes nothing. As long as it is
    constant,
    the number changes at most once.
    """
    current = min(max(before.replicas, limits.least), limits.most)
    held = replace(before, replicas=current, low_since_s=None)
    if needed is None or not math.isfinite(needed):
        return replace(held, why="nothing observed")
    wanted = min(max(math.ceil(needed / limits.target), limits.least), limits.most)
    if needed > limits.up_at * current:
        if wanted > current:
            return Scaling(wanted, now_s, None, f"{needed:.2f} needed of {current}")
        return replace(held, why=f"{needed:.2f} needed, and {limits.most} is the most")
    if not (needed < limits.down_at * current and wanted < current):
        return replace(held, why=f"{needed:.2f} needed of {current}")
    low_since_s = now_s if before.low_since_s is None else before.low_since_s
    low_for_s = now_s - low_since_s
    cool = before.changed_s is None or now_s - before.changed_s >= limits.cool_down_s
    if low_for_s >= limits.down_delay_s and cool:
        return Scaling(wanted, now_s, None, f"{needed:.2f} needed of {current}")
    return replace(held, low_since_s=low_since_s, why=f"{needed:.2f} needed of {current}, waiting")
