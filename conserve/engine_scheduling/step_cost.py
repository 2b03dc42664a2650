"""Estimates how long an engine's step takes, by how much it prefills."""

# Forgets within some fifty steps: contexts grow, and decodes come and go.
_KEEP = 0.98
_ENOUGH = 8.0
# Steps whose prefills hardly differ do not tell a slope from noise.
_LEAST_SPREAD_TOKENS = 16.0
# A step on a busy machine counts as at most this many times what was expected.
_MOST_TIMES = 4.0


class StepCost:
    """A line through recent steps' times over their prefill tokens (least squares, with
    forgetting).

    AgentServe's controller sees a late step only afterwards; this foresees it.
    """

    def __init__(self) -> None:
        self._weight = 0.0
        # Means, and sums of squares and products around them.
        self._mean_tokens = self._mean_s = 0.0
        self._square = self._product = 0.0

    def add(self, lasted_s: float, prefill_tokens: int) -> None:
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
        """Return a step's fixed seconds, and those a prefilled token adds; None while unknown."""
        if self._weight < _ENOUGH or self._square < self._weight * _LEAST_SPREAD_TOKENS**2:
            return None
        token_s = self._product / self._square
        base_s = self._mean_s - token_s * self._mean_tokens
        # Noise may make either negative.
        return max(base_s, 1e-6), max(token_s, 1e-9)

    def affordable_tokens(self, within_s: float) -> int | None:
        """Return how many tokens a step may prefill within this time; None while unknown."""
        line = self.line()
        if line is None:
            return None
        base_s, token_s = line
        return max(0, int((within_s - base_s) / token_s + 1e-6))
