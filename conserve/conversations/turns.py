"""Keeps live histories, begins their turns, and ends them when they are complete or have failed."""

from collections.abc import Callable
from sys import intern

from conserve import identity
from conserve.conversations.ledger import Engines, Idleness, Ledger
from conserve.direct import STRIDE, first_asked
from conserve.events import EventLog
from conserve.hints import Hints
from conserve.histories.prefixes import Points
from conserve.history import History
from conserve.pausing import Leads, Memory, Pausing
from conserve.placement import Decoder, PlacementPolicy, Prefiller
from conserve.recognition import Digest
from conserve.tenants.limits import TenantUsage
from conserve.turn import Broken, TurnKey, TurnStats, Unbound


class Turns:
    """All that a conversation table keeps; starts turns and ends them, and histories that end.

    Args:
        turn_timeout_s: a turn that runs for longer than this, and the idle time, counts as lost.
        first_id: turns and incarnations are numbered from here. A table that succeeds another must
            start above it.
        pausing: None pauses no histories, as in the ConServe paper.

    Attributes:
        expected_cached_tokens: tokens of prompts' beginnings that should have been cached.
        missing_cached_tokens: those of them that no engine had.
    """

    expected_cached_tokens = 0
    missing_cached_tokens = 0

    def __init__(
        self,
        policy: PlacementPolicy,
        idle_timeout_s: float,
        turn_timeout_s: float = 0.0,
        first_id: int = 1,
        pausing: Pausing | None = None,
        events: EventLog | None = None,
    ) -> None:
        self.policy, self.loads = policy, policy.loads
        self._engines = engines = Engines(self.loads)
        self.decoders, self.prefillers = engines.decoders, engines.prefillers
        self._ledger = ledger = Ledger(engines)
        self.usage, self.tools, self.notices = ledger.usage, ledger.tools, ledger.notices
        self._live, self._by_id = ledger.live, ledger.live.by_id
        self._kinship, self.parents = ledger.live.kinship, ledger.live.parents
        # Of tenants over that of a history with a prompt; the order of admission knows them.
        self.leads: Callable[[str, int], Leads] = lambda _, __: {}
        self._next_id = self.first_id = first_asked(first_id)
        self._idleness = Idleness(idle_timeout_s, turn_timeout_s, self._by_id)
        self.memory: Memory | None = None
        if pausing is not None:
            self.memory = Memory(
                pausing, engines.decoders, self._by_id.get, ledger.unbind, events, ledger.tools,
                self.parents,
            )  # fmt: skip
        # Histories that were ended for another one's room, until the table's owner has heard.
        self._displaced: list[History] = []
        # Of a predecessor: where its histories were bound, until they are again, and those of which
        # turns run.
        self._homes: dict[str, str] = {}
        self._running: dict[str, list[History]] = {}
        # Asked of one part alone.
        self.get, self.record = self._by_id.get, ledger.records.get
        self.histories, self.has_several = ledger.live.histories, ledger.live.has_several
        self.recognise, self.to_be_heard = ledger.live.recognise, ledger.live.to_be_heard
        self.rooted, self.active = self._kinship.families.rooted, ledger.active
        self.add_prefiller, self.engine_says = engines.add_prefiller, engines.says
        self.leave, self.end_when_idle_for = engines.leave, self._idleness.change

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, history_id: str) -> bool:
        return history_id in self._by_id

    def live(self) -> list[History]:
        return list(self._by_id.values())

    def used_tokens(self, since_s: float) -> int:
        """Return what decoders hold of histories that run, or were used since then."""
        bound = (one for one in self._by_id.values() if one.home is not None)
        used = (one for one in bound if one.running or one.last_used_s >= since_s)
        return sum(one.held_tokens for one in used)

    @property
    def conversations(self) -> int:
        return self._live.conversations

    @property
    def reasoning(self) -> int:
        return self._ledger.reasoning

    @property
    def accepting_decoders(self) -> list[Decoder]:
        return self._engines.accepting_decoders

    @property
    def accepting_prefillers(self) -> list[Prefiller]:
        return self._engines.accepting_prefillers

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

    def begin(self, history_id: str, now_s: float, hints: Hints | None = None) -> History | None:
        """Start a turn of a bound history; None if it is unknown or unbound."""
        history = self._by_id.get(history_id)
        if history is None or history.home is None:
            return None
        if self._engines.decoders[history.home].evicting and not history.running:
            self._ledger.unbind(history)
            return None
        if hints is not None:
            history.hints = hints
            self.parents.note(history)
        self._start(history, self._ledger.usage.of(history_id), now_s)
        if self.loads is not None:
            self.loads.turn_came(history.id, history.home, now_s, history.background)
        return history

    def began(self, turn: TurnKey, decoder_id: str, now_s: float, parks: bool = False) -> bool:
        """Note that a decoder has begun a turn by itself; False if its history is not there.

        If the history was paused before the decoder heard of that, it is bound there again, room or
        not.
        """
        history = self._live.current(turn.history_id, turn.incarnation)
        if history is None or decoder_id not in self._engines.decoders:
            return False
        if history.home is None:
            notices = self._ledger.notices
            if not notices.may_run(decoder_id, history.id, history.incarnation):
                return False
            self._take_back(history, decoder_id)
        if history.home != decoder_id:
            return False
        usage = self._ledger.usage.of(history.id)
        self._start(history, usage, now_s, turn_id=turn.turn_id)
        if self.loads is not None:
            self.loads.turn_came(history.id, decoder_id, now_s, history.background)
        if parks and self.memory is not None:
            self.memory.parks_turn(turn.turn_id)
        return True

    def _start(
        self,
        history: History,
        usage: TenantUsage,
        now_s: float,
        arrived_s: float | None = None,
        *,
        turn_id: int | None = None,
        unbound: Unbound | None = None,
        broken: Broken | None = None,
    ) -> None:
        """Start a turn of a bound history, with this number or the next one.

        Args:
            unbound: why the history was bound nowhere until now.
            broken: where its prefix is not that of another history.
        """
        if turn_id is None:
            turn_id = self._next_id
            self._next_id += STRIDE
        idle = history.has_last_turn and not history.running
        came_s = now_s if arrived_s is None else arrived_s
        ahead_s = None
        if self.memory is not None:
            ahead_s = self.memory.turn_begins(history, came_s if idle else None, now_s)
        idle_s = max(0.0, came_s - history.last_used_s) if idle else None
        record = TurnStats(
            began_s=now_s, idle_s=idle_s, had_tokens=history.last_tokens, unbound=unbound,
            broken=broken, ahead_s=ahead_s,
        )  # fmt: skip
        self._ledger.turn_starts(history, usage, turn_id, record)
        history.last_used_s = now_s

    def _number_above(self, turn_id: int) -> None:
        """Number what comes from now on above this one."""
        self._next_id = max(self._next_id, first_asked(turn_id + 1))

    def _take_back(self, history: History, decoder_id: str) -> None:
        self._ledger.bind(history, decoder_id, history.last_tokens)
        self._kinship.advanced(history)
        if self.memory is not None:
            self.memory.bound(history, kept=True)

    def prefilled(self, turn: TurnKey, stored_tokens: int = 0) -> None:
        """Note that the remote prefill of a history is over, done or failed.

        ``stored_tokens`` of its prompt are left in host memory.
        """
        history = self._live.current(turn.history_id, turn.incarnation)
        if history is not None:
            self._engines.leave_queue(history)
            self._kinship.has_come(history)
            if self.memory is not None and stored_tokens:
                self.memory.parked(history, stored_tokens)

    def has_waited(self, turn: TurnKey) -> None:
        """Note that a turn goes on that waited for its beginning to come to host memory."""
        if (history := self._live.current(turn.history_id, turn.incarnation)) is not None:
            self._kinship.has_come(history)

    def answered(self, turn: TurnKey, at_s: float) -> float | None:
        """Note a turn's first token but of a tool call; return the TTFET if it is the first."""
        history = self._live.current(turn.history_id, turn.incarnation)
        if history is None or history.asked_s is None or history.ttfet_s is not None:
            return None
        if self.loads is not None and history.home is not None:
            self.loads.done(history.home, history.id)
        asked_s = history.asked_s
        if self._live.has_several(history.id):
            for one in self._live.siblings(history.id):
                if one.asked_s is None or one.ttfet_s is not None:
                    return None
                asked_s = min(asked_s, one.asked_s)
        history.ttfet_s = at_s - asked_s
        return history.ttfet_s

    def advance(
        self,
        turn: TurnKey,
        decoder_id: str,
        stats: TurnStats,
        tails: tuple[Digest, ...],
        now_s: float,
    ) -> bool:
        """Complete a turn; False, with nothing changed, if it was reported before, or is elsewhere.

        A turn that this table does not know counts too, if it is newer than all that have ended: it
        began under a table that was lost.
        """
        history = self._live.current(turn.history_id, turn.incarnation)
        if history is None or history.home != decoder_id:
            return False
        if turn.turn_id not in history.running:
            if turn.turn_id <= history.finished:
                return False
            self._number_above(turn.turn_id)
        history.turns += 1
        self._compare(history, stats)
        has_kin = False
        if tails:
            has_kin = self._kinship.families.set_tails(history, tails, stats)
        else:
            history.last_turn = stats
        self._finish(history, turn.turn_id, stats, now_s)
        if has_kin:
            self._kinship.advanced(history)
        return True

    def abandon(
        self, turn: TurnKey, decoder_id: str | None, stats: TurnStats | None, now_s: float
    ) -> History | None:
        """End a turn that did not complete: it was refused, or failed, or its client left.

        Args:
            decoder_id: the decoder that says so, if one does.
            stats: what the engine had done by then, if anything.

        Returns:
            The history if this ended it: no turn of it has left anything, or its client cannot come
            back.
        """
        history = self._live.current(turn.history_id, turn.incarnation)
        if history is None:
            return None
        began_elsewhere = (
            stats is not None
            and turn.turn_id > history.finished
            and decoder_id is not None
            and decoder_id == history.home
        )
        if turn.turn_id in history.running or began_elsewhere:
            self._number_above(turn.turn_id)
            if stats is not None:
                history.last_turn = stats
            self._finish(history, turn.turn_id, stats, now_s)
            if stats is not None:
                # Its engine may have lost the history, and computed it again.
                self._kinship.advanced(history)
        if not history.running:
            named = not identity.is_generated(history.id)
            if not history.has_last_turn or not (history.turns or named):
                return self.release(turn.history_id)
            if history.promised:
                # Nothing of it reached the decoder that it was bound to.
                self._ledger.unbind(history)
        return None

    def _finish(
        self, history: History, turn_id: int, stats: TurnStats | None, now_s: float
    ) -> None:
        self._engines.leave_queue(history)
        if self.loads is not None:
            self.loads.turn_ended(history, stats, now_s)
        self._ledger.turn_ends(history, turn_id, now_s)
        if stats is not None:
            if history.promised:
                self._kinship.has_come(history)
            history.promised = False
            # All histories that wait for the same tool share one object.
            history.tool = None if stats.tool is None else intern(stats.tool)
            self._ledger.hold(history, stats.prompt_tokens + stats.output_tokens)
        history.last_used_s = now_s
        if self.memory is not None:
            self.memory.used(history)
            self.memory.turn_ended(history, turn_id, stats)

    def _compare(self, history: History, stats: TurnStats) -> None:
        """Compare what a history should have cached with what its engine had at a turn's begin."""
        base = history.base
        if not history.promised:
            expected = history.held_tokens
        elif base is not None:
            expected = base.tokens
        else:
            return  # A first turn mostly expects nothing.
        found = stats.found_tokens
        self.expected_cached_tokens += expected
        self.missing_cached_tokens += max(0, expected - found)
        if base is not None and found < base.tokens // 2:
            # The engine has computed it again, so all others that begin with it have lost it too.
            lost = self._kinship.evicted(history)
            if self.memory is not None:
                self.memory.lost(lost)
        elif found < expected and not history.promised:
            # A template may drop the reasoning of earlier answers, so the turn does not begin with
            # all that the one before it left.
            points = Points(history.points)
            points.clip(found)
            history.points = points.packed
