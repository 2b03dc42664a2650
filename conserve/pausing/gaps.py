"""How long conversations were idle between turns, and what that says of those that are."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

# Bounds of the buckets in which gaps are counted, in seconds: each a quarter above the one before.
_BOUNDS_S = (0.0, *(0.1 * 1.25**i for i in range(60)))
# Before any was seen: half of the gaps are longer than this, a third of those three times as long.
_PRIOR_MEDIAN_S = 10.0
# As many gaps that were seen count as much as that.
_PRIOR_WEIGHT = 8.0
# After so many, those before count half: agents change.
_MOST = 4096


class Gaps:
    """The idle times that were seen, in 122 numbers.

    Example:
        >>> gaps = Gaps()
        >>> for _ in range(100):
        ...     gaps.returned(2.0)
        >>> gaps.chance(1.0, within_s=30) > 0.95  # After a second: nearly all come back by 31 s.
        True
        >>> gaps.chance(60.0, within_s=30) < 0.5  # Who was away for a minute is another case.
        True
    """

    def __init__(self) -> None:
        self._returned = [0.0] * len(_BOUNDS_S)
        self._ended = [0.0] * len(_BOUNDS_S)
        self._seen = 0
        # Of each, how many are in a bucket or a later one; None: to be counted.
        self._longer: tuple[Sequence[float], Sequence[float]] | None = None

    def returned(self, idle_s: float) -> None:
        """A turn came after so many seconds."""
        self._add(self._returned, idle_s)

    def ended(self, idle_s: float) -> None:
        """A conversation ended when it had been idle for so long: no turn came until then."""
        self._add(self._ended, idle_s)

    def chance(self, idle_s: float, within_s: float, still_idle: int = 0) -> float:
        """The chance that the next turn comes within so many seconds, after so many without one.

        Args:
            still_idle: how many others are idle for about as long now: they have not come back
                either.

        Returns:
            Of those that were idle for as long, the share that came back within that time. It lies
            strictly between 0 and 1.
        """
        # Clocks differ between nodes.
        idle_s = max(0.0, idle_s)
        if self._longer is None:
            self._longer = (_from_the_last(self._returned), _from_the_last(self._ended))
        returned, ended = self._longer
        prior, later_prior = _prior(idle_s), _prior(idle_s + within_s)
        soon = prior - later_prior + _beyond(returned, idle_s)
        soon -= _beyond(returned, idle_s + within_s)
        return soon / (prior + _beyond(returned, idle_s) + _beyond(ended, idle_s) + still_idle)

    def _add(self, counts: list[float], idle_s: float) -> None:
        counts[bisect_right(_BOUNDS_S, max(0.0, idle_s)) - 1] += 1.0
        self._longer = None
        self._seen += 1
        if self._seen > _MOST:
            self._seen //= 2
            self._returned = [count / 2 for count in self._returned]
            self._ended = [count / 2 for count in self._ended]


def _prior(than_s: float) -> float:
    """How many gaps are assumed to have been longer."""
    return _PRIOR_WEIGHT * _PRIOR_MEDIAN_S / (_PRIOR_MEDIAN_S + than_s)


def _from_the_last(counts: Sequence[float]) -> Sequence[float]:
    return [0.0, *accumulate(reversed(counts))][::-1]


def _beyond(longer: Sequence[float], than_s: float) -> float:
    """How many were longer; within a bucket they are taken to be spread evenly."""
    at = bisect_right(_BOUNDS_S, than_s) - 1
    if at + 1 == len(_BOUNDS_S):
        return 0.0
    left = (_BOUNDS_S[at + 1] - than_s) / (_BOUNDS_S[at + 1] - _BOUNDS_S[at])
    return longer[at + 1] + left * (longer[at] - longer[at + 1])
