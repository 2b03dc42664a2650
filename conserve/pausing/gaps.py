"""Gaps between conversations' turns, and the chance that an idle one returns."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

# Bounds of the buckets in which gaps are counted, in seconds: each a quarter above the one before.
_BOUNDS_S = (0.0, *(0.1 * 1.25**i for i in range(60)))
# The prior: half of the gaps are longer than this, half of those three times as long.
_PRIOR_MEDIAN_S = 10.0
# The prior counts as this many gaps that were seen; so do all gaps beside those of one tool.
_PRIOR_WEIGHT = 8.0
# After this many, those before count half: agents change.
_MOST = 4096
MOST_TOOLS = 64


class Gaps:
    """The idle times that were seen, of all and by the tool that was called: 122 numbers each.

    A shell is done in a second, a search in ten, and a user answers in minutes, if at all. The gaps
    of all together count as much as eight of a tool's own. When too many tools are known, the one
    seen least is forgotten.
    """

    def __init__(self) -> None:
        self._all = _Seen()
        self._tools: dict[str, _Seen] = {}

    def returned(self, idle_s: float, tool: str | None = None) -> None:
        """Note a gap; ``tool`` is empty if the answer called none, None if not known."""
        self._add(idle_s, tool, ended=False)

    def ended(self, idle_s: float, tool: str | None = None) -> None:
        """Note that a conversation ended without a turn after ``idle_s``."""
        self._add(idle_s, tool, ended=True)

    def chance(
        self, idle_s: float, within_s: float, still_idle: int = 0, tool: str | None = None
    ) -> float:
        """Return the chance that the next turn comes soon, after ``idle_s`` without one.

        It is the share of those idle for as long that came back within that time, strictly between
        0 and 1. ``still_idle`` others that wait for the same tool are idle for about as long now.
        """
        # Clocks differ between nodes.
        idle_s = max(0.0, idle_s)
        prior, later_prior = _prior(idle_s), _prior(idle_s + within_s)
        soon, idle = self._all.soon_of_idle(idle_s, within_s)
        soon, idle = soon + prior - later_prior, idle + prior
        if tool is not None:
            # All gaps together, weighed like the prior.
            share = _PRIOR_WEIGHT / (_PRIOR_WEIGHT + self._all.number)
            soon, idle = share * soon, share * idle
            if (seen := self._tools.get(tool)) is not None:
                own_soon, own_idle = seen.soon_of_idle(idle_s, within_s)
                soon, idle = soon + own_soon, idle + own_idle
        return soon / (idle + still_idle)

    def _add(self, idle_s: float, tool: str | None, *, ended: bool) -> None:
        self._all.add(idle_s, ended)
        if tool is not None:
            if tool not in self._tools and len(self._tools) >= MOST_TOOLS:
                del self._tools[min(self._tools, key=lambda one: self._tools[one].number)]
            self._tools.setdefault(tool, _Seen()).add(idle_s, ended)
        if self._all.number > _MOST:
            for seen in (self._all, *self._tools.values()):
                seen.halve()


class _Seen:
    def __init__(self) -> None:
        self._returned = [0.0] * len(_BOUNDS_S)
        self._ended = [0.0] * len(_BOUNDS_S)
        self.number = 0.0
        # Of both, how many are in each bucket or a later one; None until counted again.
        self._longer: tuple[Sequence[float], Sequence[float]] | None = None

    def add(self, idle_s: float, ended: bool) -> None:
        counts = self._ended if ended else self._returned
        counts[bisect_right(_BOUNDS_S, max(0.0, idle_s)) - 1] += 1.0
        self.number += 1.0
        self._longer = None

    def halve(self) -> None:
        self.number /= 2
        self._returned = [count / 2 for count in self._returned]
        self._ended = [count / 2 for count in self._ended]
        self._longer = None

    def soon_of_idle(self, idle_s: float, within_s: float) -> tuple[float, float]:
        """Return how many came back within that time, of how many idle for longer."""
        if self._longer is None:
            self._longer = (_from_the_last(self._returned), _from_the_last(self._ended))
        returned, ended = self._longer
        back = _beyond(returned, idle_s)
        soon = back - _beyond(returned, idle_s + within_s)
        return soon, back + _beyond(ended, idle_s)


def _prior(than_s: float) -> float:
    return _PRIOR_WEIGHT * _PRIOR_MEDIAN_S / (_PRIOR_MEDIAN_S + than_s)


def _from_the_last(counts: Sequence[float]) -> Sequence[float]:
    return [0.0, *accumulate(reversed(counts))][::-1]


def _beyond(longer: Sequence[float], than_s: float) -> float:
    """Return how many were longer, taken to be spread evenly within a bucket."""
    at = bisect_right(_BOUNDS_S, than_s) - 1
    if at + 1 == len(_BOUNDS_S):
        return 0.0
    left = (_BOUNDS_S[at + 1] - than_s) / (_BOUNDS_S[at + 1] - _BOUNDS_S[at])
    return longer[at + 1] + left * (longer[at] - longer[at + 1])
