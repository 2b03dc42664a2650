"""What it costs to have a prompt prefilled elsewhere, beyond what is estimated: as observed."""

import math
from typing import NamedTuple

# What was seen so long ago counts 1/e: engines and load change, and what is not done any more,
# since it seemed dear, is tried again.
_OVER_S = 600.0
# Nothing seen counts as so many prompts that took what was estimated.
_PRIOR = 2.0
# Lengths are in this unit, so that a prior of both coefficients alike makes sense.
_UNIT_TOKENS = 4_096.0
# A prompt may take longer than estimated, or less, by as much as was estimated, or by this where
# that is more; the rest of it is an accident.
_LEAST_CLIP_S = 0.05


class Price(NamedTuple):
    """Seconds that a prefill elsewhere takes beyond what is estimated.

    Attributes:
        constant_s, per_token_s: of what is handed over.
    """

    constant_s: float = 0.0
    per_token_s: float = 0.0

    def of(self, tokens: int) -> float:
        """For so many tokens that are handed over; never less than 0, and 0 for none."""
        return max(0.0, self.constant_s + self.per_token_s * tokens) if tokens > 0 else 0.0


class HandingOver:
    """Learns the price from prompts whose first token has come.

    No profile has all of it: a prefiller's steps that are slower than they were measured, the way
    through more processes, the decoder that computes what is no whole chunk. So what prompts took
    until their first token is held against what was estimated, apart for those that were handed
    over and those that were prefilled at home. What both lack alike is an error of the estimate;
    the difference is the price.

    Each is a straight line over the length, by least squares, of which older ones count less and
    less. Single prompts that take much longer count as if they had taken twice what was estimated.

    Example:
        >>> seen = HandingOver()
        >>> for now_s in range(20):
        ...     seen.took(2.0, 1.5, tokens=8000, now_s=now_s, handed_over=True)
        ...     seen.took(1.6, 1.5, tokens=8000, now_s=now_s, handed_over=False)
        >>> round(seen.price(now_s=20.0).of(8000), 2)
        0.39
    """

    def __init__(self) -> None:
        self._handed_over = _Line()
        self._at_home = _Line()

    def took(
        self,
        seconds: float,
        estimated_s: float,
        tokens: int,
        now_s: float,
        *,
        handed_over: bool,
    ) -> None:
        """A prompt's first token has come.

        Args:
            seconds: after so long.
            estimated_s: what that should have taken.
            tokens: of the prompt, what was handed over, or would have been.
        """
        most_s = max(estimated_s, _LEAST_CLIP_S)
        excess_s = min(max(seconds - estimated_s, -most_s), most_s)
        line = self._handed_over if handed_over else self._at_home
        line.add(tokens / _UNIT_TOKENS, excess_s, now_s)

    def price(self, now_s: float) -> Price:
        """What is known of it by now."""
        there, here = self._handed_over.fit(now_s), self._at_home.fit(now_s)
        return Price(there[0] - here[0], (there[1] - here[1]) / _UNIT_TOKENS)


class _Line:
    """A decaying least-squares fit, drawn to 0 while little is known (ridge regression)."""

    __slots__ = ("_at_s", "_sums")

    def __init__(self) -> None:
        # Weights, x, x^2, y, x y.
        self._sums: tuple[float, ...] = (0.0,) * 5
        self._at_s = -math.inf

    def add(self, x: float, y: float, now_s: float) -> None:
        self._decay(now_s)
        new = (1.0, x, x * x, y, x * y)
        self._sums = tuple(old + one for old, one in zip(self._sums, new, strict=True))

    def fit(self, now_s: float) -> tuple[float, float]:
        """Constant and slope."""
        self._decay(now_s)
        weight, x, xx, y, xy = self._sums
        weight, xx = weight + _PRIOR, xx + _PRIOR
        # Never 0: Cauchy and Schwarz, and the prior.
        by = weight * xx - x * x
        return (xx * y - x * xy) / by, (weight * xy - x * y) / by

    def _decay(self, now_s: float) -> None:
        if now_s > self._at_s:
            keeps = math.exp((self._at_s - now_s) / _OVER_S)
            self._sums = tuple(keeps * one for one in self._sums)
            self._at_s = now_s
