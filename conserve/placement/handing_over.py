"""Learns what it costs to have a prompt prefilled elsewhere, beyond the estimate."""

from typing import NamedTuple

# About the last fifty prompts of either kind count. Time alone changes nothing.
_KEEP = 0.98
# The prior counts as this many prompts that took what was estimated.
_PRIOR = 2.0
# Lengths are in this unit, so that a prior of both coefficients alike makes sense.
_UNIT_TOKENS = 4_096.0
# A prompt's excess counts up to this many times the estimate, or up to this time if that is more.
_MOST_TIMES = 3.0
_LEAST_CLIP_S = 0.2


class Price(NamedTuple):
    """Seconds that a prefill elsewhere takes beyond the estimate, for the tokens handed over."""

    constant_s: float = 0.0
    per_token_s: float = 0.0

    def of(self, tokens: int) -> float:
        return max(0.0, self.constant_s + self.per_token_s * tokens) if tokens > 0 else 0.0


class HandingOver:
    """Learns the price from prompts whose first token has come.

    The excess over the estimate is fitted over the length, separately for prompts that were handed
    over and those prefilled at home. What both have in common is an error of the estimate; the
    difference is the price.
    """

    def __init__(self) -> None:
        self._handed_over = _Line()
        self._at_home = _Line()

    def took(self, seconds: float, estimated_s: float, tokens: int, *, handed_over: bool) -> None:
        """Learn from a prompt of which ``tokens`` were, or would be, handed over."""
        most_s = max(_MOST_TIMES * estimated_s, _LEAST_CLIP_S)
        excess_s = min(max(seconds - estimated_s, -most_s), most_s)
        line = self._handed_over if handed_over else self._at_home
        line.add(tokens / _UNIT_TOKENS, excess_s)

    def price(self) -> Price:
        there, here = self._handed_over.fit(), self._at_home.fit()
        return Price(there[0] - here[0], (there[1] - here[1]) / _UNIT_TOKENS)


class _Line:
    """A decaying least-squares fit, drawn to 0 while little is known (ridge regression)."""

    __slots__ = ("_sums",)

    def __init__(self) -> None:
        # Of the weights, x, x^2, y and x y.
        self._sums: tuple[float, ...] = (0.0,) * 5

    def add(self, x: float, y: float) -> None:
        new = (1.0, x, x * x, y, x * y)
        self._sums = tuple(_KEEP * old + one for old, one in zip(self._sums, new, strict=True))

    def fit(self) -> tuple[float, float]:
        weight, x, xx, y, xy = self._sums
        weight, xx = weight + _PRIOR, xx + _PRIOR
        # Never 0, by Cauchy and Schwarz and the prior.
        by = weight * xx - x * x
        return (xx * y - x * xy) / by, (weight * xy - x * y) / by
