"""Ends histories that are released, or were not used for too long."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import InitVar, dataclass

from conserve.conversations.engines import Engines
from conserve.conversations.ledger import Ledger
from conserve.direct.desk import first_asked
from conserve.events import EventLog
from conserve.history import History
from conserve.pausing import Memory, Pausing
from conserve.placement import PlacementPolicy


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


@dataclass(eq=False)
class Ending:
    """Keeps live histories and engines, and ends histories.

    `Turns`, `Binding` and `ConversationTable` each add to it.

    Args:
        turn_timeout_s: a turn that runs for longer than this, and the idle time, counts as lost.
        first_id: turns and incarnations are numbered from here. A table that succeeds another must
            start above it.
        pausing: None pauses no histories, as in the ConServe paper.
    """

    policy: PlacementPolicy
    idle_timeout_s: InitVar[float]
    turn_timeout_s: InitVar[float] = 0.0
    first_id: int = 1
    pausing: InitVar[Pausing | None] = None
    events: InitVar[EventLog | None] = None

    def __post_init__(
        self,
        idle_timeout_s: float,
        turn_timeout_s: float,
        pausing: Pausing | None,
        events: EventLog | None,
    ) -> None:
        self.loads = self.policy.loads
        self._engines = engines = Engines(self.loads)
        self.decoders, self.prefillers = engines.decoders, engines.prefillers
        self._ledger = ledger = Ledger(engines)
        self.usage, self.tools, self.notices = ledger.usage, ledger.tools, ledger.notices
        self._live, self._by_id = ledger.live, ledger.live.by_id
        self._kinship = ledger.live.kinship
        self._next_id = self.first_id = first_asked(self.first_id)
        self._idleness = Idleness(idle_timeout_s, turn_timeout_s, self._by_id)
        self.memory: Memory | None = None
        if pausing is not None:
            self.memory = Memory(
                pausing, engines.decoders, self._by_id.get, ledger.unbind, events, ledger.tools
            )
        # What others may ask, and may do to engines.
        live, by_id = self._live, self._by_id
        self.get, self.histories, self.has_several = by_id.get, live.histories, live.has_several
        self.recognise, self.to_be_heard = live.recognise, live.to_be_heard
        self.rooted = self._kinship.families.rooted
        self.active, self.facts = ledger.active, ledger.facts
        self.add_prefiller, self.engine_says = engines.add_prefiller, engines.says
        self.leave, self.is_leaving = engines.leave, engines.is_leaving
        self.end_when_idle_for = self._idleness.change

    def release(self, history_id: str) -> History | None:
        """End a history, whose tokens no longer count; None if it is unknown."""
        history = self._ledger.take_out(history_id)
        if history is not None:
            self._ledger.give_up(history, ended=True)
            if self.memory is not None:
                self.memory.ended(history)
        return history

    def expire(self, now_s: float) -> list[History]:
        """End the histories not used for the idle time, the longest unused first."""
        ended = self._idleness.ended(now_s)
        for history in ended:
            if self.memory is not None and not history.running:
                self.memory.expired(history, now_s)
            self.release(history.id)
        ended.sort(key=lambda one: one.last_used_s)
        return ended
