"""How much a step may prefill beside decodes."""

from conserve.engine_scheduling.step_cost import StepCost


class ChunkController:
    """A budget of prefill tokens a step, fed back on time per output token (AgentServe, algorithm
    1), and never more than the step's fitted cost allows.

    Over an interval with decodes, TPOT is the time of its steps over their number (dL/dK). Above
    ``late_s`` the budget shrinks by an eighth of ``most_tokens``; below ``calm_share * late_s`` it
    grows by as much, and no more than doubles: the step's cost is known after the first few. The
    paper gives no constants: these are ours. So are two departures, since taken literally the
    budget drifts to its most while all is calm, and the next long prefill hits the decodes at full
    size:

    - It grows only after an interval in which it was what a prefill was cut to. A calm interval
      without one says nothing about what larger prefills would do.
    - What `StepCost` says would make a step last longer than nine tenths of ``late_s`` is not
      allowed, however large the budget. Where that cuts, the budget need not grow.

    The paper's R, the SMs that decodes have to themselves, is `DecodeReserve`'s.

    What is allowed lies between ``least_tokens`` and ``most_tokens`` always: prefills come to an
    end beside any decodes.

    Args:
        least_tokens: B_min. More than a block and a usual append: below that an append, which is
            what decodes should not wait for a lane for, would be cut.
        most_tokens: B_max; what the engine computes in a step.
        late_s: theta_high, the bound of time per output token.
        calm_share: theta_low, as a share of ``late_s``.
        interval_s: dt: so long at least, and eight steps.

    Raises:
        ValueError: a setting is out of its range; says which.

    Example:
        >>> chunks = ChunkController(least_tokens=64, most_tokens=1024, late_s=0.05)
        >>> chunks.allowed_tokens()
        64
        >>> for step in range(1, 9):
        ...     chunks.was_cut()
        ...     chunks.step(0.006, 64, now_s=step * 0.01)
        >>> chunks.allowed_tokens()  # Calm, and the budget was too small.
        128
        >>> for step in range(1, 9):
        ...     chunks.step(0.2, 128, now_s=1 + step * 0.2)
        >>> chunks.allowed_tokens()  # Late.
        64
    """

    _LEAST_STEPS = 8
    _PARTS = 8
    # Steps that are meant to last just as long as they may would be late half of the time.
    _AIM = 0.9

    def __init__(
        self,
        least_tokens: int,
        most_tokens: int,
        *,
        late_s: float = 0.05,
        calm_share: float = 0.8,
        interval_s: float = 0.05,
    ) -> None:
        if not 0 < least_tokens <= most_tokens:
            raise ValueError(f"least_tokens: {least_tokens} is not within 1 and {most_tokens}")
        if not late_s > 0:
            raise ValueError(f"late_s: {late_s} is not above 0")
        if not 0 <= calm_share < 1:
            raise ValueError(f"calm_share: {calm_share} is not within 0 and 1")
        self._least = least_tokens
        self._most = most_tokens
        self.late_s = late_s
        self._calm_s = calm_share * late_s
        self._interval_s = interval_s
        self._delta = max(1, most_tokens // self._PARTS)
        self._budget = least_tokens
        self._cost = StepCost()
        self._was_cut = False
        self._since_s: float | None = None
        self._lasted_s = 0.0
        self._steps = 0
        # Of the last interval.
        self.tpot_s = 0.0

    @property
    def budget_tokens(self) -> int:
        """B: what the feedback allows."""
        return self._budget

    def allowed_tokens(self) -> int:
        """How many tokens the next step may prefill, if anybody decodes in it."""
        affordable = self._affordable_tokens()
        if affordable is None:
            return self._budget
        return max(self._least, min(self._budget, affordable))

    def was_cut(self) -> None:
        """A prefill got less than it could have used, since no more was allowed."""
        affordable = self._affordable_tokens()
        if affordable is None or self._budget <= affordable:
            self._was_cut = True

    def step(self, lasted_s: float, prefill_tokens: int, now_s: float) -> None:
        """A step with decodes is over.

        Args:
            lasted_s: from its beginning, or the end of the step before, to its end.
            prefill_tokens: that it computed beside them.
        """
        self._cost.add(lasted_s, prefill_tokens)
        self._lasted_s += lasted_s
        self._steps += 1
        if self._since_s is None:
            self._since_s = now_s - lasted_s
        if self._steps < self._LEAST_STEPS or now_s - self._since_s < self._interval_s:
            return
        self.tpot_s = self._lasted_s / self._steps
        if self.tpot_s > self.late_s:
            self._budget = max(self._least, self._budget - self._delta)
        elif self.tpot_s < self._calm_s and self._was_cut:
            self._budget = min(self._most, self._budget + min(self._delta, self._budget))
        self._since_s, self._lasted_s, self._steps, self._was_cut = now_s, 0.0, 0, False

    def _affordable_tokens(self) -> int | None:
        return self._cost.affordable_tokens(self._AIM * self.late_s)
