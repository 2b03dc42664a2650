"""Limits how many histories are active, by the pressure on engines and on tools' machine."""

import math
from dataclasses import dataclass

# Bounds of `Pressure.cpu`: above the first it counts as high, below the second as low.
_CPU_HIGH, _CPU_LOW = 0.9, 0.7
# The same of `Pressure.tools`: tools take twice as long as usual, and a third longer.
_TOOLS_HIGH, _TOOLS_LOW = 0.5, 0.25


class _Overload:
    """A signal with hysteresis: on above one bound for long enough, off below another."""

    def __init__(self, high: float, low: float, persists_s: float) -> None:
        self._high = high
        self._low = low
        self._persists_s = persists_s
        self._high_since_s: float | None = None
        self.on = False
        self.slack = True

    def observe(self, now_s: float, value: float) -> None:
        self.slack = value < self._low
        if value < self._high:
            self._high_since_s = None
            self.on = self.on and not self.slack
            return
        if self._high_since_s is None:
            self._high_since_s = now_s
        self.on = self.on or now_s - self._high_since_s >= self._persists_s


@dataclass(frozen=True, slots=True)
class Pressure:
    """The pressures on memories and on tools' machine, from 0 to 1.

    Attributes:
        kv: of the tokens that prompts should have found cached, the share computed again.
        cpu: of the machine that tools run on; 0 without one.
        tools: of tools' times, the share that they take longer than usual (`ToolTimes`).
    """

    kv: float = 0.0
    cpu: float = 0.0
    tools: float = 0.0


class Window:
    """The most histories that may be active: W = min(W_adm, W_cpu), or no bound.

    W_adm follows additive increase and multiplicative decrease (MARS, algorithm 1), but has no
    bound before the first overload, nor once it has been twice the active histories for
    ``forget_s``. During an overload, W_cpu would bring ``Pressure.cpu`` and ``Pressure.tools`` to
    their bounds if they were proportional to the active histories. An overload begins when one of
    them has been high for ``persists_s``, and ends when it is low. KV is left to the working set
    (`conserve.pausing.cache`).
    """

    def __init__(
        self,
        least: int = 2,
        grow: float = 1.0,
        shrink: float = 0.7,
        interval_s: float = 10.0,
        persists_s: float = 30.0,
        forget_s: float = 60.0,
    ) -> None:
        self.interval_s = interval_s
        self._least = least
        self._grow = grow
        self._shrink = shrink
        self._forget_s = forget_s
        self._cpu = _Overload(_CPU_HIGH, _CPU_LOW, persists_s)
        self._tools = _Overload(_TOOLS_HIGH, _TOOLS_LOW, persists_s)
        self._observed_s = -math.inf
        self._admitted = math.inf
        self._wide_since_s: float | None = None
        self.limit: float = math.inf
        self.pressure = Pressure()

    def is_due(self, now_s: float) -> bool:
        return now_s - self._observed_s >= self.interval_s

    def observe(self, now_s: float, active: int, pressure: Pressure) -> None:
        if not self.is_due(now_s):
            return
        self._observed_s = now_s
        self.pressure = pressure
        self._cpu.observe(now_s, pressure.cpu)
        self._tools.observe(now_s, pressure.tools)
        if self._is_overload():
            self._admitted = max(self._least, self._shrink * min(self._admitted, active))
        elif self._cpu.slack:
            # Tools' times vary: while they are no overload, they do not hold it back.
            self._admitted += self._grow
        self._forget(now_s, active)
        cpu = active * _CPU_HIGH / pressure.cpu if self._cpu.on else math.inf
        # Tools would take their usual time with 1 - pressure of the active histories.
        tools = active * (1 - pressure.tools) / (1 - _TOOLS_HIGH) if self._tools.on else math.inf
        limit = min(self._admitted, cpu, tools)
        self.limit = limit if limit == math.inf else max(self._least, math.floor(limit))

    def _is_overload(self) -> bool:
        return self._cpu.on or self._tools.on

    def _forget(self, now_s: float, active: int) -> None:
        if self._admitted < 2 * active or self._is_overload():
            self._wide_since_s = None
        elif self._wide_since_s is None:
            self._wide_since_s = now_s
        elif now_s - self._wide_since_s >= self._forget_s:
            self._admitted = math.inf
