"""Limits how much a step may prefill beside decodes, by what steps have taken."""

from statistics import median

# Steps are late above this many times one without prefills. AgentServe scales what model and device
# take alone by a constant, which it does not give (section IV-A).
LATE_TIMES = 2.0
# Forgets within some fifty steps: contexts grow, and decodes come and go.
_KEEP = 0.98
_ENOUGH = 8.0
# Steps whose prefills hardly differ do not tell a slope from noise.
_LEAST_SPREAD_TOKENS = 16.0
# A step on a busy machine counts as at most this many times what was expected.
_MOST_TIMES = 4.0


class StepCost:
    """A line through recent steps' times over their prefill tokens.

    AgentServe's controller sees a late step only afterwards; this foresees it.
    """

    def __init__(self, keep: float = _KEEP, least_spread: float = _LEAST_SPREAD_TOKENS) -> None:
        self._keep, self._least_spread = keep, least_spread
        self._weight = 0.0
        # Means, and sums of squares and products around them.
        self._mean_tokens = self._mean_s = 0.0
        self._square = self._product = 0.0

    def add(self, lasted_s: float, prefill_tokens: int) -> None:
        line = self.line()
        if line is not None:
            base_s, token_s = line
            lasted_s = min(lasted_s, _MOST_TIMES * (base_s + token_s * prefill_tokens))
        self._weight = self._keep * self._weight + 1.0
        off_tokens = prefill_tokens - self._mean_tokens
        self._mean_tokens += off_tokens / self._weight
        self._mean_s += (lasted_s - self._mean_s) / self._weight
        self._square = self._keep * self._square + off_tokens * (prefill_tokens - self._mean_tokens)
        self._product = self._keep * self._product + off_tokens * (lasted_s - self._mean_s)

    def line(self) -> tuple[float, float] | None:
        """Return a step's fixed seconds, and those a prefilled token adds; None while unknown."""
        if self._weight < _ENOUGH or self._square < self._weight * self._least_spread**2:
            return None
        token_s = self._product / self._square
        base_s = self._mean_s - token_s * self._mean_tokens
        # Noise may make either negative.
        return max(base_s, 1e-6), max(token_s, 1e-9)

    def affordable_tokens(self, within_s: float) -> int | None:
        line = self.line()
        if line is None:
            return None
        base_s, token_s = line
        return max(0, int((within_s - base_s) / token_s + 1e-6))


class ChunkController:
    """A budget of prefill tokens a step, by feedback on TPOT (AgentServe, algorithm 1).

    Over an interval with decodes, TPOT is the time of its steps over their number (dL/dK). Above
    ``late_s`` (theta_high) the budget shrinks by an eighth of ``most_tokens`` (B_max). Below
    ``calm_share`` of that (theta_low) it grows by as much, at most to twice, if it limited a
    prefill. See README.md for departures.

    Args:
        least_tokens: B_min. More than a block and a usual append, so that appends are not cut.
        late_s: None: `LATE_TIMES` a step of the same decodes without prefills, and at least that of
            one that decodes for one call alone.
        lone_s: the time of the latter; None: as the first of them took.

    Raises:
        ValueError: a setting is out of its range.
    """

    _LEAST_STEPS = 8
    _PARTS = 8
    # Steps aimed at the bound itself would be late half of the time.
    _AIM = 0.9
    # That many steps with one decode alone tell the bound. An engine's warm-up has about twenty.
    _LONE_STEPS = 12
    _ASSUMED_LATE_S = 0.05

    def __init__(
        self,
        least_tokens: int,
        most_tokens: int,
        *,
        late_s: float | None = None,
        lone_s: float | None = None,
        calm_share: float = 0.8,
        interval_s: float = 0.05,
    ) -> None:
        if not 0 < least_tokens <= most_tokens:
            raise ValueError(f"least_tokens: {least_tokens} is not within 1 and {most_tokens}")
        if late_s is not None and not late_s > 0:
            raise ValueError(f"late_s: {late_s} is not above 0")
        if not 0 <= calm_share < 1:
            raise ValueError(f"calm_share: {calm_share} is not within 0 and 1")
        self._least = least_tokens
        self._most = most_tokens
        self._late_s = late_s
        self._lone_s = lone_s
        self._lone_steps_s: list[float] = []
        # Of recent steps, what they would take without prefills.
        self._base_s = 0.0
        self._calm_share = calm_share
        self._interval_s = interval_s
        self._delta = max(1, most_tokens // self._PARTS)
        self._budget = least_tokens
        self._cost = StepCost()
        self._was_cut = False
        self._since_s: float | None = None
        self._lasted_s = 0.0
        self._steps = 0
        # In the last interval.
        self.tpot_s = 0.0

    @property
    def alone_late_s(self) -> float:
        """Return the bound for decodes that nothing else slows down, however few SMs they have."""
        if self._late_s is not None:
            return self._late_s
        return self._ASSUMED_LATE_S if self._lone_s is None else LATE_TIMES * self._lone_s

    @property
    def late_s(self) -> float:
        if self._late_s is not None or self._lone_s is None:
            return self.alone_late_s
        return LATE_TIMES * max(self._lone_s, self._base_s)

    @property
    def budget_tokens(self) -> int:
        return self._budget

    def allowed_tokens(self) -> int:
        affordable = self._affordable_tokens()
        if affordable is None:
            return self._budget
        return max(self._least, min(self._budget, affordable))

    def was_cut(self) -> None:
        """Note that a prefill got less than it could have used."""
        affordable = self._affordable_tokens()
        if affordable is None or self._budget <= affordable:
            self._was_cut = True

    def step(self, lasted_s: float, prefill_tokens: int, now_s: float, decodes: int) -> None:
        if self._lone_s is None and decodes == 1 and not prefill_tokens:
            self._lone_steps_s.append(lasted_s)
            if len(self._lone_steps_s) == self._LONE_STEPS:
                self._lone_s = median(self._lone_steps_s)
        self._cost.add(lasted_s, prefill_tokens)
        line = self._cost.line()
        if line is not None:
            self._base_s = line[0]
        self._lasted_s += lasted_s
        self._steps += 1
        if self._since_s is None:
            self._since_s = now_s - lasted_s
        if self._steps < self._LEAST_STEPS or now_s - self._since_s < self._interval_s:
            return
        self.tpot_s = self._lasted_s / self._steps
        if line is None and self._budget == self._least:
            # Steps with less cannot be tried, so this is nearly what the decodes take.
            self._base_s = self.tpot_s
        if self.tpot_s > self.late_s:
            self._budget = max(self._least, self._budget - self._delta)
        elif self.tpot_s < self._calm_share * self.late_s and self._was_cut:
            self._budget = min(self._most, self._budget + min(self._delta, self._budget))
        self._since_s, self._lasted_s, self._steps, self._was_cut = now_s, 0.0, 0, False

    def _affordable_tokens(self) -> int | None:
        return self._cost.affordable_tokens(self._AIM * self.late_s)
