"""Knows a table's engines, its live histories, where these are bound, and what they count for."""

import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import islice

from conserve import identity
from conserve.direct import Notices
from conserve.histories.kinship import Kinship
from conserve.histories.parents import Parents
from conserve.histories.prefixes import mark
from conserve.history import FOLLOWING, History, State
from conserve.pausing import RunningTools
from conserve.placement import Decoder, EngineLoad, Loads, Prefiller
from conserve.recognition import Chain
from conserve.tenants.limits import TenantUsage, UsageBook
from conserve.turn import TurnStats, Unbound


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


logger = logging.getLogger("conserve.table")

# At most this many histories with the same newest tail are looked at.
_LOOKED_AT = 256


class LiveHistories:
    """Finds live histories; only `add` and `remove` change ``by_id``."""

    def __init__(self, charge: Callable[[History, int], None]) -> None:
        self.by_id: dict[str, History] = {}
        self.kinship = Kinship(self.by_id.get, charge)
        self._families = self.kinship.families
        # By conversation, its histories that do not bear its id. Most conversations have none.
        self._further: dict[str, dict[str, None]] = {}
        self.parents = Parents(self.histories)

    def add(self, history: History) -> bool:
        """Add a history, and return whether it is the first of its conversation."""
        is_first = not self.lives(history.id)
        if identity.is_further(history.id):
            conversation_id = identity.conversation_of(history.id)
            self._further.setdefault(conversation_id, {})[history.id] = None
        self.by_id[history.id] = history
        self._families.join(history)
        self.parents.note(history)
        return is_first

    def remove(self, history: History) -> bool:
        """Remove a history, and return whether it was the last of its conversation."""
        del self.by_id[history.id]
        self._families.leave(history)
        conversation_id = identity.conversation_of(history.id)
        further = self._further.get(conversation_id)
        if further is not None and identity.is_further(history.id):
            further.pop(history.id, None)
            if not further:
                del self._further[conversation_id]
        is_last = not self.lives(history.id)
        if is_last:
            self.parents.remove(conversation_id)
        return is_last

    def current(self, history_id: str, incarnation: int) -> History | None:
        history = self.by_id.get(history_id)
        if history is None or history.incarnation != incarnation:
            return None
        return history

    def histories(self, conversation_id: str) -> list[History]:
        ids = (conversation_id, *self._further.get(conversation_id, ()))
        return [self.by_id[id] for id in ids if id in self.by_id]

    def siblings(self, history_id: str) -> list[History]:
        conversation_id = identity.conversation_of(history_id)
        return [one for one in self.histories(conversation_id) if one.id != history_id]

    def lives(self, history_id: str) -> bool:
        """Return whether its conversation has a live history, this one or another."""
        conversation_id = identity.conversation_of(history_id)
        return conversation_id in self.by_id or conversation_id in self._further

    def has_several(self, history_id: str) -> bool:
        """Return whether its conversation has histories that do not bear its id."""
        return identity.conversation_of(history_id) in self._further

    @property
    def conversations(self) -> int:
        beyond_one = sum(
            len(further) - (conversation_id not in self.by_id)
            for conversation_id, further in self._further.items()
        )
        return len(self.by_id) - beyond_one

    def recognise(self, chain: Chain, conversation_id: str | None = None) -> str | None:
        """Return the history that a turn continues; None if it begins another. See `Families`."""
        if conversation_id is not None and identity.is_generated(conversation_id):
            # Its client states an id that was generated for it, so no other conversation will do.
            own = [one for one in self.histories(conversation_id) if one.root == chain.root]
            for end in (*chain.ends, chain.root):
                those = [one for one in own if mark(end) in one.tails]
                if those:
                    return next((one.id for one in those if not one.running), None)
            return None
        return self._families.match(chain, conversation_id)

    def to_be_heard(self, chain: Chain, conversation_id: str | None) -> set[str]:
        """Return the decoders of running turns whose answer a turn may already follow.

        Such a turn's messages go on beyond what is known of the history.
        """
        if not chain.ends:
            return set()
        before = islice(self._families.before(chain, conversation_id), _LOOKED_AT)
        running = (one.home for one in before if one.running)
        return {decoder_id for decoder_id in running if decoder_id is not None}


RECENT_S = 30.0
"""A history whose last turn ended less long ago is active: its tools run."""


class Activity:
    """Bound histories that are idle since less than `RECENT_S`."""

    def __init__(self) -> None:
        # When each became idle, in that order.
        self._idle_s: OrderedDict[str, float] = OrderedDict()

    def idle(self, history_id: str, now_s: float) -> None:
        self._idle_s[history_id] = now_s
        self._idle_s.move_to_end(history_id)
        self._forget(now_s)

    def not_idle(self, history_id: str) -> None:
        self._idle_s.pop(history_id, None)

    def acting(self, now_s: float) -> int:
        self._forget(now_s)
        return len(self._idle_s)

    def _forget(self, now_s: float) -> None:
        while self._idle_s:
            history_id, since_s = next(iter(self._idle_s.items()))
            if now_s - since_s < RECENT_S:
                break
            del self._idle_s[history_id]


class Engines:
    """Decoders and prefillers, as placement sees them; a prefiller that hosts is both.

    ``loads`` is what is known of their work; None if the policy does not ask.
    """

    def __init__(self, loads: Loads | None) -> None:
        self.loads = loads
        self.decoders: dict[str, Decoder] = {}
        self.prefillers: dict[str, Prefiller] = {}

    def add_prefiller(self, prefiller_id: str) -> None:
        self.prefillers.setdefault(prefiller_id, Prefiller(prefiller_id))

    def add_decoder(self, decoder_id: str, capacity_tokens: int) -> None:
        if decoder_id not in self.decoders:
            self.decoders[decoder_id] = Decoder(decoder_id, capacity_tokens)

    def remove(self, engine_id: str) -> None:
        self.decoders.pop(engine_id, None)
        self.prefillers.pop(engine_id, None)
        if self.loads is not None:
            self.loads.gone(engine_id)

    def says(self, engine_id: str, load: EngineLoad, now_s: float) -> None:
        if self.loads is not None and (engine_id in self.decoders or engine_id in self.prefillers):
            self.loads.says(engine_id, load, now_s)

    def left(self, history: History) -> None:
        if self.loads is not None and history.home is not None:
            self.loads.left(history.id, history.home)

    def leave(self, engine_id: str) -> None:
        """Give an engine nothing new; it keeps what it has."""
        for one in (self.decoders.get(engine_id), self.prefillers.get(engine_id)):
            if one is not None:
                one.leaving = True

    @property
    def accepting_decoders(self) -> list[Decoder]:
        return [one for one in self.decoders.values() if not one.leaving]

    @property
    def accepting_prefillers(self) -> list[Prefiller]:
        return [one for one in self.prefillers.values() if not one.leaving]

    def join_queue(self, history: History, prefiller_id: str, tokens: int) -> None:
        """Queue a history's tokens, of which none are queued yet, at a prefiller."""
        history.prefiller_id = prefiller_id
        history.prefill_tokens = tokens
        self.prefillers[prefiller_id].queued_tokens += tokens

    def leave_queue(self, history: History) -> None:
        """Take a history out of its prefiller's queue, if it is in one."""
        if history.prefiller_id is None:
            return
        if self.loads is not None:
            self.loads.done(history.prefiller_id, history.id)
        prefiller = self.prefillers.get(history.prefiller_id)
        if prefiller is not None:
            prefiller.queued_tokens -= history.prefill_tokens
        history.prefiller_id = None
        history.prefill_tokens = 0


class Ledger:
    """Counts what histories hold, where they are bound, and which of their turns run.

    All changes of these happen here, so that they always agree, with the histories' states.

    Attributes:
        strict: whether a history that gets into a state that cannot follow its own is an error
            (`FOLLOWING`), and not only logged.
        records: of the turns that run, by their number.
    """

    strict = False

    def __init__(self, engines: Engines) -> None:
        self._decoders = engines.decoders
        self._engines = engines
        self._activity = Activity()
        self.live = LiveHistories(self._charge)
        self._sharing = self.live.kinship.sharing
        self.reasoning = 0
        self.usage = UsageBook()
        self.tools = RunningTools()
        self.notices = Notices()
        self.records: dict[int, TurnStats] = {}
        # Why histories are bound nowhere whose engine is gone, or goes; not those that were paused.
        self.without_engine: dict[str, Unbound] = {}

    def add(self, history: History, usage: TenantUsage) -> None:
        """Add a history with its running turns; what it holds is not counted yet."""
        usage.conversations += self.live.add(history)
        usage.histories += 1
        if history.running:
            usage.turns += len(history.running)
            self.reasoning += 1

    def inherit(self, history: History) -> None:
        """Add a predecessor's history, which is bound nowhere until its decoder registers."""
        history.home = history.prefiller_id = history.base = None
        history.held_tokens = history.prefill_tokens = 0
        history.running, history.promised = (), False
        history.state = State.UNBOUND
        usage = self.usage.of(history.id)
        usage.began(history.created_s)
        self.add(history, usage)

    def take_out(self, history_id: str) -> History | None:
        """Count a history nowhere any more; None if it is unknown."""
        history = self.live.by_id.get(history_id)
        if history is None:
            return None
        self.tools.forget(history_id)
        self._engines.leave_queue(history)
        self._engines.left(history)
        if history.home is not None:
            self._sharing.hold(history, 0)
            self._decoders[history.home].conversations -= 1
        usage = self.usage.of(history_id)
        usage.conversations -= self.live.remove(history)
        usage.histories -= 1
        usage.turns -= len(history.running)
        if history.running:
            self.reasoning -= 1
        self._activity.not_idle(history.id)
        self.without_engine.pop(history_id, None)
        self._forget_records(history.running)
        self._become(history, State.ENDED)
        return history

    def bind(self, history: History, decoder_id: str, tokens: int) -> None:
        """Bind a history, which was bound nowhere, and count what it holds."""
        history.home = decoder_id
        self.without_engine.pop(history.id, None)
        self._decoders[decoder_id].conversations += 1
        self._sharing.hold(history, tokens)
        self._become(history, State.BOUND)
        if history.running:
            self._become(history, State.RUNNING)

    def hold(self, history: History, tokens: int) -> None:
        if history.home is not None:
            self._sharing.hold(history, tokens)

    def unbind(self, history: History, state: State = State.UNBOUND) -> None:
        """Bind a history nowhere, and tell its decoder so."""
        self._become(history, state)
        self._engines.left(history)
        if history.home is not None:
            self._sharing.hold(history, 0)
            self._decoders[history.home].conversations -= 1
            self.give_up(history)
            if self._decoders[history.home].leaving:
                self.without_engine[history.id] = "left"
        history.home = None
        history.promised = False
        self._activity.not_idle(history.id)

    def give_up(self, history: History, *, ended: bool = False) -> None:
        """Tell a history's decoder that it no longer has it."""
        if history.home is not None:
            self.notices.give_up(history.home, history.id, history.incarnation, ended=ended)

    def lose(self, history: History) -> None:
        """Unbind a history whose decoder is lost, and end its turns."""
        self._sharing.hold(history, 0)
        self.usage.of(history.id).turns -= len(history.running)
        self._forget_records(history.running)
        if history.home is not None:
            leaves = self._decoders[history.home].leaving
            self.without_engine[history.id] = "left" if leaves else "lost"
        history.home = None
        self._activity.not_idle(history.id)
        if history.running:
            history.finished = max(history.finished, *history.running)
            history.running = ()
            self.reasoning -= 1
        self._become(history, State.UNBOUND)

    def turn_starts(
        self, history: History, usage: TenantUsage, turn_id: int, record: TurnStats
    ) -> None:
        usage.turns += 1
        self.records[turn_id] = record
        self.tools.forget(history.id)
        if not history.running:
            self.reasoning += 1
            self._activity.not_idle(history.id)
        history.running += (turn_id,)
        self._become(history, State.RUNNING)

    def turn_ends(self, history: History, turn_id: int, now_s: float) -> None:
        self.records.pop(turn_id, None)
        running = history.running
        if turn_id in running:
            at = running.index(turn_id)
            # Keep its own object, not the caller's equal one: a table may have a million.
            turn_id = running[at]
            self.usage.of(history.id).turns -= 1
            history.running = running[:at] + running[at + 1 :]
            if not history.running:
                self.reasoning -= 1
                self._activity.idle(history.id, now_s)
                self._become(history, State.BOUND)
        history.finished = max(history.finished, turn_id)

    def _become(self, history: History, state: State) -> None:
        before = history.state
        if before is not state and state not in FOLLOWING[before]:
            what = f"history {history.id!r} was {before.name}, and is {state.name}"
            if self.strict:
                raise ValueError(what)
            logger.error("%s", what)
        history.state = state

    def _forget_records(self, turn_ids: Iterable[int]) -> None:
        for turn_id in turn_ids:
            self.records.pop(turn_id, None)

    def active(self, now_s: float) -> int:
        """Return how many histories are active: a turn runs, or did within `RECENT_S`."""
        return self.reasoning + self._activity.acting(now_s)

    def _charge(self, history: History, tokens: int) -> None:
        assert history.home is not None
        self._decoders[history.home].held_tokens += tokens
        self.usage.of(history.id).held_tokens += tokens
