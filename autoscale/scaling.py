"""From how many replicas are needed to how many there are to be: bounds, hysteresis, cool-down.

Scaling up is immediate, since a saturated role is what it is for, and what is needed does not
depend on how many are starting. Scaling down waits: for the need to stay low, and for the last
change to be some time past.
"""

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds and thresholds by which one role scales.

    By default engines are added before those that there are saturate, and removed only where the
    rest is then far from that: between `down_at` and `up_at` a constant need changes nothing.

    Attributes:
        least, most: bounds on the number of replicas.
        target: utilisation to have after a change, or less.
        up_at: above this utilisation there are too few.
        down_at: below it there are too many.
        down_delay_s: how long there have to be too many, without a break, before any is removed.
        cool_down_s: how long after a change none is removed.
    """

    least: int
    most: int
    target: float = 0.7
    up_at: float = 0.85
    down_at: float = 0.5
    down_delay_s: float = 60.0
    cool_down_s: float = 60.0

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
    """A decision, and what the next one has to know of it.

    Attributes:
        replicas: how many are wanted.
        changed_s: when that number changed last; None: never.
        low_since_s: since when fewer would do; None: they would not.
        why: the reason, for people.
    """

    replicas: int
    changed_s: float | None = None
    low_since_s: float | None = None
    why: str = "start"


def scale(limits: Limits, before: Scaling, needed: float | None, now_s: float) -> Scaling:
    """Decide how many replicas there are to be.

    For a constant ``needed`` there is at most one change: after it, utilisation is at most
    ``target`` and fewer replicas would exceed that.

    Args:
        needed: replicas that, fully used, would just be enough; None: nothing could be observed,
            and all stays as it is.
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
