"""Learns what it costs to have a prompt prefilled elsewhere, beyond what is estimated."""

from typing import NamedTuple

# About the last fifty of either kind count. Time alone changes nothing.
_KEEP = 0.98
# Nothing seen counts as so many prompts that took what was estimated.
_PRIOR = 2.0
# Lengths are in this unit, so that a prior of both coefficients alike makes sense.
_UNIT_TOKENS = 4_096.0
# A prompt may take longer than estimated by so many times the estimate, or by this where that is
# more; the rest of it is an accident.
_MOST_TIMES = 3.0
_LEAST_CLIP_S = 0.2


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

    Where no prompt was prefilled at home yet, the estimate of that is believed. Each is a straight
    line over the length, by least squares, in which older ones count less with each new one.

    Example:
        >>> seen = HandingOver()
        >>> for _ in range(20):
        ...     seen.took(2.0, 1.5, tokens=8000, handed_over=True)
        ...     seen.took(1.6, 1.5, tokens=8000, handed_over=False)
        >>> round(seen.price().of(8000), 2)
        0.39
    """

    def __init__(self) -> None:
        self._handed_over = _Line()
        self._at_home = _Line()

    def took(self, seconds: float, estimated_s: float, tokens: int, *, handed_over: bool) -> None:
        """A prompt's first token has come.

        Args:
            seconds: after so long.
            estimated_s: what that should have taken.
            tokens: of the prompt, what was handed over, or would have been.
        """
        most_s = max(_MOST_TIMES * estimated_s, _LEAST_CLIP_S)
        excess_s = min(max(seconds - estimated_s, -most_s), most_s)
        line = self._handed_over if handed_over else self._at_home
        line.add(tokens / _UNIT_TOKENS, excess_s)

    def price(self) -> Price:
        """Return the price as it is known by now."""
        there, here = self._handed_over.fit(), self._at_home.fit()
        return Price(there[0] - here[0], (there[1] - here[1]) / _UNIT_TOKENS)


class _Line:
    """A decaying least-squares fit, drawn to 0 while little is known (ridge regression)."""

    __slots__ = ("_sums",)

    def __init__(self) -> None:
        # Weights, x, x^2, y, x y.
        self._sums: tuple[float, ...] = (0.0,) * 5

    def add(self, x: float, y: float) -> None:
        new = (1.0, x, x * x, y, x * y)
        self._sums = tuple(_KEEP * old + one for old, one in zip(self._sums, new, strict=True))

    def fit(self) -> tuple[float, float]:
        """Constant and slope."""
        weight, x, xx, y, xy = self._sums
        weight, xx = weight + _PRIOR, xx + _PRIOR
        # Never 0: Cauchy and Schwarz, and the prior.
        by = weight * xx - x * x
        return (xx * y - x * xy) / by, (weight * xy - x * y) / by
