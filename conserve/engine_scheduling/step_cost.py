"""Estimates what a step of an engine costs, by how much it prefills."""

# What is older than some fifty steps says little: contexts grow, and decodes come and go.
_KEEP = 0.98
_ENOUGH = 8.0
# Steps whose prefills hardly differ do not tell a slope from noise.
_LEAST_SPREAD_TOKENS = 16.0
# One step that took so many times what was expected (a busy machine) counts as that many.
_MOST_TIMES = 4.0


class StepCost:
    """A line through the steps of late: how long one takes, by its prefill tokens.

    Least squares with exponential forgetting. It is not in AgentServe, whose controller only sees
    that a step was late when it was: it keeps the first long prefill after a calm time from being
    the one that shows it.

    Example:
        >>> cost = StepCost()
        >>> for tokens in (0, 64, 0, 128, 0, 64, 256, 0, 0, 64):
        ...     cost.add(0.004 + 0.0001 * tokens, tokens)
        >>> cost.affordable_tokens(within_s=0.05)
        460
    """

    def __init__(self) -> None:
        self._weight = 0.0
        # Means, and sums of squares and products around them.
        self._mean_tokens = self._mean_s = 0.0
        self._square = self._product = 0.0

    def add(self, lasted_s: float, prefill_tokens: int) -> None:
        """A step is over."""
        line = self.line()
        if line is not None:
            base_s, token_s = line
            lasted_s = min(lasted_s, _MOST_TIMES * (base_s + token_s * prefill_tokens))
        self._weight = _KEEP * self._weight + 1.0
        off_tokens = prefill_tokens - self._mean_tokens
        self._mean_tokens += off_tokens / self._weight
        self._mean_s += (lasted_s - self._mean_s) / self._weight
        self._square = _KEEP * self._square + off_tokens * (prefill_tokens - self._mean_tokens)
        self._product = _KEEP * self._product + off_tokens * (lasted_s - self._mean_s)

    def line(self) -> tuple[float, float] | None:
        """Seconds that a step takes anyway, and those that a token of prefill adds.

        Returns:
            Both above 0; None while there is too little to tell.
        """
        if self._weight < _ENOUGH or self._square < self._weight * _LEAST_SPREAD_TOKENS**2:
            return None
        token_s = self._product / self._square
        base_s = self._mean_s - token_s * self._mean_tokens
        # Seen through noise: some time it takes.
        return max(base_s, 1e-6), max(token_s, 1e-9)

    def affordable_tokens(self, within_s: float) -> int | None:
        """How many tokens a step may prefill to last no longer than that; None: not known yet."""
        line = self.line()
        if line is None:
            return None
        base_s, token_s = line
        return max(0, int((within_s - base_s) / token_s + 1e-6))
