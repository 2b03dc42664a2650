"""How many of a GPU's SMs decodes have to themselves, in slots of a tenth."""

import math
from dataclasses import dataclass

SLOTS = 10
# What is read from memory comes as fast from this share of the SMs as from all of them: assumed;
# AgentServe's figure 3 (an image) has decodes saturate early, and prefills nearly linear.
_SATURATES_AT = 0.4


def bandwidth_of(share: float) -> float:
    """Of the memory's bandwidth, what so many of the SMs get."""
    return min(1.0, share / _SATURATES_AT)


@dataclass(slots=True)
class FixedShare:
    """A split that nothing moves."""

    share: float = 0.5

    def step(self, lasted_s: float, now_s: float) -> None:
        """A step with decodes is over."""


class FedBackShare:
    """R of AgentServe's algorithm 1: a slot more while time per output token is late, a slot less
    while it is calm.

    Three choices are ours. A step is calm below six tenths of the bound. Feedback comes each 50 ms,
    and eight steps. R ends at 90 %, where the algorithm has all of the SMs: else prefills stand
    still for as long as decodes are late.

    Args:
        base: the smallest share: R_base, at which decodes alone are within the bound.
        late_s: the bound.
    """

    _CALM, _LEAST_STEPS, _INTERVAL_S = 0.6, 8, 0.05

    def __init__(self, base: float, late_s: float) -> None:
        self._base = self._slots = max(1, math.ceil(base * SLOTS - 1e-9))
        self._late_s = late_s
        self._lasted_s, self._steps = 0.0, 0
        self._since_s: float | None = None

    @property
    def share(self) -> float:
        """Of the SMs, those that decodes have."""
        return self._slots / SLOTS

    def step(self, lasted_s: float, now_s: float) -> None:
        """A step with decodes is over."""
        if self._since_s is None:
            self._since_s = now_s - lasted_s
        self._lasted_s += lasted_s
        self._steps += 1
        if self._steps < self._LEAST_STEPS or now_s - self._since_s < self._INTERVAL_S:
            return
        tpot_s = self._lasted_s / self._steps
        if tpot_s > self._late_s:
            self._slots = min(SLOTS - 1, self._slots + 1)
        elif tpot_s < self._CALM * self._late_s:
            self._slots = max(self._base, self._slots - 1)
        self._since_s, self._lasted_s, self._steps = now_s, 0.0, 0
