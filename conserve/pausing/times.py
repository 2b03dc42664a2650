"""Gaps between conversations' turns, with the chance that an idle one returns, and times of tools.

Tools that slow each other down take longer than usual while many run.
"""

import math
from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

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

    def add(self, idle_s: float, tool: str | None = None, *, ended: bool = False) -> None:
        """Note a gap, or that a conversation ``ended`` after it, without a turn.

        ``tool`` is empty if the answer called none, None if not known.
        """
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


# Shorter times are mostly those of the client and the network.
_LEAST_S = 0.1
# A time counts as at most this many times as long, or as short, as usual. A tool that runs for even
# longer, and for longer than this time, counts as over: its client may be gone.
_MOST_TIMES, _OVER_S = 16.0, 30.0
# A tool's usual time is not known before this many calls. Averages are over about as many calls.
_KNOWN, _AVERAGED = 16, 64
# Fewer tools than this have a CPU each on any machine that serves a model.
_MANY = 4
# Up to a quarter more tools than the fewest that ran in the last ten to twenty minutes are few.
_FEW, _PERIOD_S = 1.25, 600.0
# Times of tools that share CPUs grow with the number of tools, or with a power of it above this.
# It takes this number of calls to tell, and about this number is remembered.
_GROWS, _TELLING, _REMEMBERED = 1 / 3, 128, 512
# What is usual is in doubt only if tools take a third longer.
_LONGER = math.log(4 / 3)


class _Run(NamedTuple):
    """A tool that runs; ``beside``: how many ran when it began, this one included."""

    tool: Hashable
    since_s: float
    until_s: float
    beside: int


@dataclass(slots=True)
class _Usual:
    """The mean logarithm of a tool's times while few run, in seconds, of this many calls."""

    calls: int
    log_s: float

    def learn(self, longer: float) -> None:
        self.calls += 1
        self.log_s += longer / min(self.calls, 2 * _AVERAGED)


class _Slope:
    """The least-squares line through the points that were added last."""

    def __init__(self) -> None:
        self._sums = [0.0] * 6

    def add(self, x: float, y: float) -> None:
        for at, value in enumerate((1.0, x, y, x * x, x * y, y * y)):
            self._sums[at] += value - self._sums[at] / _REMEMBERED

    def is_below(self, bound: float) -> bool:
        """Return whether the slope is below a bound by one and a half standard errors."""
        number, x, y, xx, xy, yy = self._sums
        if number < _TELLING:
            return False
        spread_x, both, spread_y = xx - x * x / number, xy - x * y / number, yy - y * y / number
        if spread_x < 1e-6 * number:
            return False  # As many ran beside each.
        slope = both / spread_x
        error = math.sqrt(max(0.0, spread_y - slope * both) / number / spread_x)
        return slope + 1.5 * error < bound


class ToolTimes:
    """The tools that run, and how much longer than usual they take while many run.

    MARS (section 4.1, table 1: tool_num and tool_start/end) sees the pressure on tools' CPUs by the
    number of active tools and a moving average of their times, and leaves open when these are an
    overload. Here a time counts in relation to what is usual for its tool: the average while few
    tools run. Times of one tool differ by orders of magnitude, so averages are of logarithms.

    Tools may also become slow by themselves, or be called for longer work. Then their times hardly
    depend on how many run. As soon as that shows, what is usual is learned anew.
    """

    def __init__(self) -> None:
        self._running: dict[Hashable, _Run] = {}
        # The tool that ended last is the last.
        self._usual: dict[Hashable, _Usual] = {}
        # Moving averages: by how much calls took longer (as a logarithm, 0 where few tools ran),
        # and how many ran where it was many.
        self._longer = 0.0
        self._beside = 1.0
        # By how much calls took longer, by how many ran, since they take longer; as logarithms.
        self._by_number = _Slope()
        self._long_s = -math.inf
        # The least number that ran in this period, and in the one before it.
        self._period_s = -math.inf
        self._least = self._least_before = math.inf

    @property
    def running(self) -> int:
        return len(self._running)

    def begins(self, run: Hashable, tool: Hashable, now_s: float) -> None:
        """Note that a tool begins; ``run`` names it among those that run."""
        self._running.pop(run, None)
        usual = self._usual.get(tool)
        usual_s = 0.0 if usual is None else math.exp(usual.log_s)
        until_s = now_s + max(_OVER_S, _MOST_TIMES * usual_s)
        self._running[run] = _Run(tool, now_s, until_s, len(self._running) + 1)

    def ends(self, run: Hashable, now_s: float) -> None:
        """Note that a tool is done; one that counts as over changes nothing."""
        if (one := self._running.get(run)) is None:
            return
        beside = max(one.beside, len(self._running))
        del self._running[run]
        log_s = math.log(max(_LEAST_S, now_s - one.since_s))
        usual = self._usual.pop(one.tool, None) or _Usual(0, log_s)
        self._usual[one.tool] = usual
        if len(self._usual) > MOST_TOOLS:
            del self._usual[next(iter(self._usual))]
        most = math.log(_MOST_TIMES)
        longer = max(-most, min(most, log_s - usual.log_s))
        is_known, is_few = usual.calls >= _KNOWN, self._is_few(beside, now_s)
        is_many = is_known and not is_few
        self._longer += (longer * is_many - self._longer) / _AVERAGED
        if is_many:
            self._beside += (beside - self._beside) / _AVERAGED
        if is_known:
            self._by_number.add(math.log(beside), longer)
        if is_few or not is_known:
            usual.learn(longer)

    def drop(self, run: Hashable) -> None:
        """Forget a tool that runs: how long it takes is not known."""
        self._running.pop(run, None)

    def pressure(self, now_s: float) -> float:
        """Return the share of tools' times, from 0 to 1, that they take longer than usual.

        If fewer run now than did beside the calls that took longer, it is less in proportion.
        """
        for run in [run for run, one in self._running.items() if one.until_s < now_s]:
            del self._running[run]
        if self._longer > _LONGER:
            if now_s - self._long_s > _PERIOD_S:
                self._by_number = _Slope()
            self._long_s = now_s
            if self._by_number.is_below(_GROWS):
                self._usual.clear()
                self._longer = 0.0
        if len(self._running) < _MANY:
            return 0.0
        times = math.exp(self._longer) * min(1.0, len(self._running) / self._beside)
        return max(0.0, 1 - 1 / times)

    def _is_few(self, beside: int, now_s: float) -> bool:
        if now_s - self._period_s >= _PERIOD_S:
            self._period_s = now_s
            self._least, self._least_before = math.inf, self._least
        self._least = min(self._least, beside)
        return beside < _MANY or beside <= _FEW * min(self._least, self._least_before)
