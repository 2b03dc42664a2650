"""Notes when live histories have been idle for too long."""

from collections import defaultdict
from collections.abc import Mapping

from conserve.history import History


class Idleness:
    """Notes when to look whether a history is idle, in periods of a 256th of the idle time.

    Using a history does not change this. Ending it leaves its id behind until that period is looked
    at, or most of the listed ids are such. A turn that runs for ``turn_timeout_s`` longer counts as
    lost.
    """

    def __init__(
        self, idle_timeout_s: float, turn_timeout_s: float, live: Mapping[str, History]
    ) -> None:
        self._idle_timeout_s = idle_timeout_s
        self._turn_timeout_s = turn_timeout_s
        self._live = live
        self._period_s = max(1.0, idle_timeout_s / 256)
        self._looks: defaultdict[int, list[str]] = defaultdict(list)
        self._listed = 0

    def change(self, idle_timeout_s: float) -> None:
        """End histories after another idle time; those that live are watched anew."""
        self._idle_timeout_s = idle_timeout_s
        for history in self._live.values():
            self.watch(history)

    def watch(self, history: History) -> None:
        """Look at a history once it may have been idle for too long."""
        self._look_at(history, history.last_used_s + self._idle_timeout_s)

    def watch_in_place(self, held: History, known: History | None) -> None:
        """Look at a history of which ``held`` is the new record, and ``known`` the one before."""
        held.period = 0 if known is None else known.period
        idle_at_s = held.last_used_s + self._idle_timeout_s
        if known is None or idle_at_s < known.period * self._period_s:
            self._look_at(held, idle_at_s)

    def ended(self, now_s: float) -> list[History]:
        """Return the histories that have been idle for too long, and stop watching them."""
        ended = []
        due = [period for period in self._looks if period <= now_s // self._period_s]
        for history in [found for period in due for found in self._take(period)]:
            idle_at_s = history.last_used_s + self._idle_timeout_s
            lost_at_s = idle_at_s + self._turn_timeout_s
            if idle_at_s > now_s:
                self._look_at(history, idle_at_s)
            elif history.running and lost_at_s > now_s:
                # If its turn ends now, it is idle at the first of these two times.
                self._look_at(history, min(now_s + self._idle_timeout_s, lost_at_s))
            else:
                ended.append(history)
        return ended

    def _look_at(self, history: History, when_s: float) -> None:
        history.period = int(when_s // self._period_s)
        self._looks[history.period].append(history.id)
        self._listed += 1
        if self._listed > 2 * len(self._live) + 1000:
            # Most ids were left behind. Clear one period at a time, in turns: all at once takes
            # seconds for a million.
            period = next(iter(self._looks))
            ids = [found.id for found in self._take(period)]
            if ids:
                self._looks[period] = ids
                self._listed += len(ids)

    def _take(self, period: int) -> list[History]:
        ids = self._looks.pop(period)
        self._listed -= len(ids)
        found = (self._live.get(id) for id in dict.fromkeys(ids))
        return [one for one in found if one is not None and one.period == period]
