"""Follows where histories' KV is: on a decoder and counted, left there uncounted, or nowhere."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from math import inf
from typing import Any

from conserve.events import EventLog, Kind
from conserve.histories.parents import Parents
from conserve.histories.prefixes import Going, held_alone
from conserve.history import History, State
from conserve.holdings import Parked
from conserve.identity import tenant_of
from conserve.pausing.cache import EngineCache, HostMemory, WorkingSet
from conserve.pausing.policy import Idle, Leads, Pausing
from conserve.pausing.prefetch import Prefetches
from conserve.pausing.tools import RunningTools, Wait
from conserve.placement import NOTHING_SHARED, Coming, Decoder, Shared
from conserve.recognition import Digest
from conserve.turn import TurnStats
from conserve.wire import history_key

# Looking at an idle history takes some microseconds. So at most this many are looked at on each
# decoder, the longest unused, and all only if these are not enough. If that was in vain, the next
# look waits.
_LOOKED_AT = 256
_IN_VAIN_S = 0.5
# What host memory would evict sooner than that is touched while its turn waits.
_TOUCHED_S = 15.0
PAUSE_REASONS = ("room", "mark", "load", "prefetch")
RESTORES = ("kept", "reloaded", "moved", "again")


@dataclass(frozen=True, slots=True)
class Forgotten:
    """A history that a decoder which it has left may forget."""

    decoder_id: str
    history_id: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Hold:
    """A decoder's engine should hold what it has of a history for this time from now on."""

    history_id: str
    incarnation: int
    for_s: float


@dataclass(eq=False)
class Memory:
    """Pauses idle histories, and knows where they may still be found.

    A *paused* history is bound to no decoder and counts nowhere; its next turn is placed anew. Its
    decoder keeps its KV until the engine needs the room. Reasons are ``room`` (a prompt fits
    nowhere), ``mark`` (a decoder's running turns have grown, and it holds more than it should),
    ``load`` (its next turn has come, and ends sooner elsewhere) and ``prefetch`` (it was brought
    back, and its next turn did not come).
    A *parked* history, paused or not, has a copy in host memory.

    Attributes:
        working: with host memory, what it and engines should keep.
        pauses: counts, by reason.
        restores: counts of histories that came back: ``kept`` to the decoder that still has them,
            ``reloaded`` from host memory, ``moved`` to another decoder and ``again`` to the same
            one, to be computed again.
    """

    _policy: Pausing
    _decoders: Mapping[str, Decoder]
    _get: Callable[[str], History | None]
    _unbind: Callable[[History, State], None]
    _events: EventLog | None
    _tools: RunningTools
    _parents: Parents

    def __post_init__(self) -> None:
        self._caches: dict[str, EngineCache] = {}
        # Parked histories (none without host memory), and turns that will leave theirs there.
        self._host = HostMemory(0)
        self._parking: set[int] = set()
        self.working = WorkingSet()
        self.prefetches = Prefetches()
        # By decoder, its histories of which its engine should have nothing any more.
        self._emptied: dict[str, dict[str, None]] = {}
        # The decoder that each paused history was on, and the tokens that it shared there.
        self._paused_on: dict[str, tuple[str, int]] = {}
        # Decoders that histories were on, and that have a record of them.
        self._left: dict[str, set[str]] = {}
        # By decoder, the histories whose copies its engine has to touch.
        self._touched: dict[str, list[str]] = {}
        self._forgotten: list[Forgotten] = []
        # By decoder that asks: histories of which a turn has ended since then.
        self._rested: dict[str, dict[str, None]] = {}
        # Until when not to look again whether a decoder can be relieved. The same for making room,
        # by histories that are away (False) or by all (True) of these decoders, with the tokens;
        # whether that is for the background, and how many tenants lead the prompt's.
        self._in_vain: dict[str, float] = {}
        self._no_room: dict[tuple[Any, ...], tuple[float, int]] = {}
        self.pauses: Counter[str] = Counter()
        self.restores: Counter[str] = Counter()
        self.paused_tokens = 0

    @property
    def keeps(self) -> bool:
        """Return whether there is host memory, so that any decoder may continue a history."""
        return self._host.capacity_tokens > 0

    @property
    def parked_tokens(self) -> int:
        """Return how many tokens host memory has, as far as is known."""
        return self._host.tokens

    @property
    def has_host_room(self) -> bool:
        """Whether host memory evicts nothing yet."""
        return self._host.oldest_s == -inf

    def set_host_tokens(self, tokens: int) -> None:
        """Set the room in host memory; 0 means that nothing is parked."""
        if tokens:
            self._host.resize(tokens)
        else:
            self._host = HostMemory(0)

    def turn_begins(self, history: History, came_s: float | None, now_s: float) -> float | None:
        """Note that a turn begins; return how long before it the history was brought back, if so.

        ``came_s`` is None unless the history was idle.
        """
        if came_s is not None:
            wait = self._wait(history)
            policy = self._policy
            gaps = policy.resumes if wait.tool_ended else policy.gaps
            gaps.add(came_s - wait.since_s, wait.tool)
            self._tools.turn_came(history.id, came_s)
        self.working.add(history.id, _own_tokens(history))
        self.used(history)
        return self.prefetches.turn_came(history.id, now_s)

    def used(self, history: History) -> None:
        """Note that a history's KV is on its decoder, as a turn begins or ends."""
        decoder_id = history.home
        if decoder_id is None:
            return
        cache = self._caches.get(decoder_id)
        if cache is None:
            cache = EngineCache(self._decoders[decoder_id].capacity_tokens)
            self._caches[decoder_id] = cache
            self._emptied[decoder_id] = {}
        gone = cache.use(history.id, _own_tokens(history), history.last_used_s)
        emptied = self._emptied[decoder_id]
        if emptied:
            emptied.pop(history.id, None)
        for history_id in gone:
            other = self._get(history_id)
            if other is not None and other.home == decoder_id:
                emptied[history_id] = None

    def park(self, history: History) -> bool:
        """Return whether the turn that has just begun leaves its KV in host memory too."""
        if history.running[-1] in self._parking:
            return True
        if not self.parks_on(history.home or "", history.last_used_s):
            return False
        self._parking.add(history.running[-1])
        return True

    def parks_on(self, decoder_id: str, now_s: float) -> bool:
        """Return whether turns that begin on a decoder leave their KV in host memory too."""
        cache = self._caches.get(decoder_id)
        if not self.keeps or cache is None:
            return False
        decoder = self._decoders[decoder_id]
        engine_s, host_s = now_s - cache.oldest_s, now_s - self._host.oldest_s
        return self._policy.parks(decoder.occupancy, engine_s, host_s)

    def parks_turn(self, turn_id: int) -> None:
        if self.keeps:
            self._parking.add(turn_id)

    def turn_ended(self, history: History, turn_id: int, stats: TurnStats | None) -> None:
        """Note that a turn has ended; ``stats`` is None if the engine did nothing for it."""
        if not history.running:
            if stats is not None:
                self._tools.turn_ended(history)
            if (due_s := history.due_s) is not None:
                self.prefetches.expect(history.id, due_s)
            until_s = history.last_used_s + self._policy.hold_s(self._wait(history).tool)
            self.working.rest(history.id, _own_tokens(history), until_s)
        if (rested := self._rested.get(history.home or "")) is not None:
            rested[history.id] = None
        parking = turn_id in self._parking
        self._parking.discard(turn_id)
        if stats is None or not self.keeps:
            return
        had_tokens = self._host.left_tokens(_key(history))
        tokens = stats.parked_after(had_tokens, parking)
        if tokens is None:
            return
        if tokens < had_tokens:
            self._host.drop(_key(history))
        if tokens:
            self.parked(history, tokens)
        if parking:
            # The output is left there with the next turn's prompt.
            self._tell("park", history, tokens=stats.prompt_tokens)

    def parked(self, history: History, tokens: int) -> None:
        """Note that host memory has at least so much of a history, from its beginning on."""
        if self.keeps:
            used_s, shared_tokens = history.last_used_s, history.shared_tokens
            self._host.use(_key(history), tokens, used_s, shared_tokens)

    def all_parked(self, histories: Iterable[History]) -> list[Parked]:
        """Return what host memory has of these, for a table that succeeds this one."""
        found = ((one, self._host.left_tokens(_key(one))) for one in histories)
        return [Parked(one.id, one.incarnation, n, one.last_used_s) for one, n in found if n]

    def take_over(self, parked: Iterable[Parked]) -> None:
        uses = []
        for one in parked:
            history = self._get(one.id)
            if history is not None and history.incarnation == one.incarnation:
                uses.append((_key(history), one.tokens, one.at_s, history.shared_tokens))
        if self.keeps:
            self._host.take_over(uses)

    def turns_lost(self, history_id: str, turn_ids: Iterable[int]) -> None:
        self._parking.difference_update(turn_ids)
        self.working.remove(history_id)

    def lost(self, histories: Iterable[History]) -> None:
        for history in histories:
            if history.home in self._caches:
                self._caches[history.home].drop(history.id)
                self._emptied[history.home][history.id] = None

    def bound(self, history: History, kept: bool) -> bool:
        """Note that a history is bound again, and return whether to another decoder.

        ``kept``: its decoder continues with what it, or host memory, has of it.
        """
        was_on, _ = self._paused_on.pop(history.id, (None, 0))
        there = self._host.left_tokens(_key(history))
        if was_on is None:
            # Its decoder was lost, or has left.
            self._tell("restore", history, where="reloaded" if kept and there else "unbound")
            return True
        # If this turn fails, that decoder still has its record of the history.
        self._left.setdefault(history.id, set()).add(was_on)
        moved = was_on != history.home
        cache = self._caches.get(was_on)
        here = 0 if moved or cache is None else cache.left_tokens(history.id)
        if kept and 2 * here < there:
            where = "reloaded"
        elif moved:
            where = "moved"
        else:
            where = "kept" if kept else "again"
        self.restores[where] += 1
        self._tell("restore", history, where=where, was_on=was_on)
        return moved

    def brings_back_to(self, history: History) -> str | None:
        """Return the decoder to which a paused history may be brought back now; None: to none.

        Its KV is loaded from host memory, one history at a time, into room that is free. No live
        history of the decoder may lose its KV by that.
        """
        was_on = self.paused_on(history.id) or ""
        decoder, cache = self._decoders.get(was_on), self._caches.get(was_on)
        if decoder is None or cache is None or decoder.leaving:
            return None
        parked, here = self._host.left_tokens(_key(history)), cache.left_tokens(history.id)
        # Most of it is there anyway, or nowhere.
        useless = 2 * here >= parked or 2 * parked < history.last_tokens
        if useless or history.last_tokens > decoder.free_tokens or self.prefetches.loads_on(was_on):
            return None
        free_tokens = decoder.capacity_tokens - cache.tokens
        for other_id in cache:
            if free_tokens >= parked - here:
                break
            other = self._get(other_id)
            if other is not None and other.home == was_on:
                return None
            free_tokens += cache.left_tokens(other_id)
        return was_on if free_tokens >= parked - here else None

    def prefetched(self, history: History, due_s: float) -> None:
        """Note that a history is brought back to its home, for a turn that is due."""
        assert history.home is not None
        self.prefetches.begin(history.id, history.home, due_s)
        # Until it is there, its room may be taken like that of one that its engine has lost.
        self._emptied[history.home][history.id] = None

    def give_back(self, history: History) -> None:
        """Pause a history that was brought back in vain, unless its decoder is emptied."""
        if history.home is None:
            self.prefetches.drop(history.id)
        else:
            self.pause(history, "prefetch")

    def expired(self, history: History, now_s: float) -> None:
        self._policy.gaps.add(now_s - history.last_used_s, history.tool, ended=True)

    def ended(self, history: History) -> None:
        """Note that a history has ended; decoders that it was on before may forget it."""
        self.prefetches.drop(history.id)
        self.turns_lost(history.id, history.running)
        left = self._left.pop(history.id, set())
        was_on, _ = self._paused_on.pop(history.id, (None, 0))
        if was_on is not None:
            left.add(was_on)
        if history.home is not None:
            self._emptied.get(history.home, {}).pop(history.id, None)
        self._forgotten += [
            Forgotten(decoder_id, history.id, history.incarnation)
            for decoder_id in sorted(left)
            if decoder_id in self._decoders and decoder_id != history.home
        ]

    def found_on(self, history: History) -> None:
        """Note that a history turns out to be on its decoder still."""
        was_on, _ = self._paused_on.pop(history.id, (None, 0))
        if was_on is not None and was_on != history.home:
            self._left.setdefault(history.id, set()).add(was_on)

    def moved_from(self, history: History) -> None:
        """Note that a history turns out to have left the decoder that it is bound to."""
        assert history.home is not None
        self._left.setdefault(history.id, set()).add(history.home)

    def decoder_lost(self, decoder_id: str) -> None:
        self.prefetches.drop_on(decoder_id)
        self._caches.pop(decoder_id, None)
        self._emptied.pop(decoder_id, None)
        self._in_vain.pop(decoder_id, None)
        self._rested.pop(decoder_id, None)
        self._touched.pop(decoder_id, None)
        self._no_room.clear()

    def take_holds(self, decoder_id: str, now_s: float) -> list[Hold]:
        """Return how long an engine should hold the histories that became idle since the last call.

        It decides by itself if the client has said when the next turn comes, or that none does.
        """
        holds = []
        rested, self._rested[decoder_id] = self._rested.get(decoder_id, {}), {}
        for history_id in rested:
            history = self._get(history_id)
            if history is None or history.home != decoder_id or history.running:
                continue
            said = history.hints
            if said is not None and (said.expected_resume_s is not None or said.last_step):
                continue
            wait = self._wait(history)
            for_s = self._policy.hold_s(wait.tool) - max(0.0, now_s - history.last_used_s)
            holds.append(Hold(history_id, history.incarnation, max(0.0, for_s)))
        return holds

    def is_warm(self, history_id: str, prompt_tokens: int) -> bool:
        """Return whether a memory has most of the prompt of a history that is bound nowhere."""
        found = self.found(history_id, NOTHING_SHARED)
        most = max(found.left_tokens, found.parked_tokens)
        return self.keeps and 2 * most >= prompt_tokens

    def free_tokens(self, now_s: float) -> float:
        """Return how much may be added to the working set, so that a memory can keep all of it.

        Host memory has what engines hold, too, so the larger of both counts. There is no bound
        without host memory, where those that wait are computed again all the same.
        """
        if not self.keeps or not self._decoders:
            return inf
        self.working.advance(now_s)
        return max(self._engines_tokens(), self._host.capacity_tokens) - self.working.tokens

    def _engines_tokens(self) -> int:
        return sum(one.capacity_tokens for one in self._decoders.values())

    def touch(self, waiting: Iterable[str], now_s: float) -> None:
        """Note which copies engines have to touch, so that host memory evicts others first.

        It evicts what was used least lately, which would be what has waited longest.
        """
        for history in filter(None, map(self._get, waiting)):
            was_on = self.paused_on(history.id) or ""
            there = was_on in self._decoders
            if there and self._host.renew(_key(history), _TOUCHED_S, now_s):
                self._touched.setdefault(was_on, []).append(history.id)

    def take_touched(self, decoder_id: str) -> list[str]:
        """Return the histories that an engine has to touch in host memory, since the last call."""
        return self._touched.pop(decoder_id, [])

    def take_forgotten(self) -> list[Forgotten]:
        """Return the histories that decoders may forget, since the last call."""
        forgotten, self._forgotten = self._forgotten, []
        return forgotten

    def left_on(self, decoder_id: str) -> set[str]:
        """Return live histories that were on this decoder, and are paused or have moved."""
        paused = {id for id, (was_on, _) in self._paused_on.items() if was_on == decoder_id}
        return paused | {id for id, decoders in self._left.items() if decoder_id in decoders}

    def paused_on(self, history_id: str) -> str | None:
        """Return the decoder that a paused history was on; None if it is not paused."""
        return self._paused_on.get(history_id, (None, 0))[0]

    def found(self, history_id: str, shared: Shared) -> Shared:
        """Add to ``shared`` where a history may still be."""
        history = self._get(history_id)
        if history is not None and _key(history) in self._host:
            shared = replace(shared, parked_tokens=self._host.left_tokens(_key(history)))
        was_on, shared_tokens = self._paused_on.get(history_id, ("", 0))
        if history is not None and history.home is not None:
            was_on, shared_tokens = history.home, history.shared_tokens
        cache = self._caches.get(was_on)
        if cache is None or history_id not in cache:
            return shared
        left_tokens = cache.left_tokens(history_id) + shared_tokens
        return replace(shared, left_on=was_on, left_tokens=left_tokens)

    def lent(self, lenders: Iterable[tuple[History, int]], shared: Shared) -> Shared:
        """Add to ``shared`` what host memory has, or is about to have, of others' beginning."""
        if not self.keeps:
            return shared
        parked_tokens, coming = shared.parked_tokens, None
        for one, tokens in lenders:
            parked_tokens = max(parked_tokens, min(tokens, self._host.left_tokens(_key(one))))
            found = Coming(one.id, one.prefiller_id or one.home or "", tokens)
            if self.is_coming(found) and (coming is None or tokens > coming.tokens):
                coming = found
        if coming is not None and coming.tokens <= parked_tokens:
            coming = None
        return replace(shared, parked_tokens=parked_tokens, coming=coming)

    def is_coming(self, one: Coming) -> bool:
        """Return whether a prefill that leaves its prompt in host memory is not done yet."""
        history = self._get(one.history_id)
        if not self.keeps or history is None or not history.home or not history.promised:
            return False
        if self._host.left_tokens(_key(history)) >= one.tokens:
            return False
        return history.prefiller_id is not None or not self._parking.isdisjoint(history.running)

    def make_room(
        self,
        tokens: int,
        decoders: Sequence[Decoder],
        shared: Shared,
        now_s: float,
        *,
        waited_s: float | None = None,
        root: Digest | None = None,
        any_runs: bool = True,
        background: bool = False,
        leads: Leads | None = None,
    ) -> bool:
        """Pause histories of the cheapest decoder that are away or parked, so that a prompt fits.

        Args:
            waited_s: how long the turn of a paused history has waited: in the end, any idle history
                may be paused for it. None for a new history.
            root: of the prompt: histories that begin with it stay, if that is enough.
            any_runs: whether a turn runs. While none does, any idle history may be paused.
            background: whether the prompt is; any other may take the room of background histories.
            leads: over the prompt's tenant. It may take the room of those that lead; while turns
                run, ``waited_s`` gives it that of none that are behind it.

        Returns:
            False if the others leave too little room everywhere.
        """
        patience_s = self._policy.patience_s
        any_idle = not any_runs or (waited_s is not None and waited_s >= patience_s)
        leads = leads or {}
        ahead = sum(lead > 0 for lead in leads.values())
        which = any_idle, background, ahead, tuple(one.id for one in decoders)
        until_s, at_least = self._no_room.get(which, (now_s, 0))
        if now_s < until_s and tokens >= at_least:
            return False
        cheapest: tuple[float, list[History]] | None = None
        for most in (_LOOKED_AT, None):
            idle = self._idle(now_s, [one.id for one in decoders], most)
            for id, those in idle.items() if leads else ():
                idle[id] = [replace(one, lead=leads.get(tenant_of(one.id), 0.0)) for one in those]
            for decoder in decoders:
                may_go = idle[decoder.id]
                if any_runs:
                    may_go = [
                        one
                        for one in may_go
                        if self._policy.may_go(one)
                        or (one.background and not background)
                        or (any_idle and one.lead >= 0)
                    ]
                missing = tokens - decoder.free_tokens
                held_tokens = shared.tokens.get(decoder.id, 0)
                enough = None
                if held_tokens:
                    others = [one for one in may_go if self._root(one) != root]
                    enough = self._enough(others, missing - held_tokens)
                if enough is None:
                    enough = self._enough(may_go, missing)
                if enough is not None and (cheapest is None or enough[0] < cheapest[0]):
                    cheapest = enough
            if cheapest is not None or max(map(len, idle.values()), default=0) < _LOOKED_AT:
                break
        if cheapest is None:
            self._no_room[which] = (now_s + _IN_VAIN_S, tokens)
            return False
        for history in cheapest[1]:
            self.pause(history, "room")
        return bool(cheapest[1])

    def relieve(self, decoder: Decoder, others: Collection[Decoder], now_s: float) -> None:
        """Pause idle histories of a decoder that holds more than it should.

        First those that may go, or fit on one of the ``others``; then any. If more are bound than
        fit, they evict each other, and all are computed again and again (ThunderAgent, section
        4.3).
        """
        excess = self._policy.excess_tokens(decoder.held_tokens, decoder.capacity_tokens)
        if not excess or now_s < self._in_vain.get(decoder.id, now_s):
            return
        chosen: list[tuple[Idle, History]] = []
        freed = 0
        for most in (_LOOKED_AT, None):
            idle = self._idle(now_s, [decoder.id], most)[decoder.id]
            chosen, freed = self._cheapest(idle, excess, self._may_leave(decoder, others))
            if freed >= excess or len(idle) < _LOOKED_AT:
                break
        if freed < excess:
            chosen, freed = self._cheapest(idle, excess, lambda _: True)
        if freed < excess:
            self._in_vain[decoder.id] = now_s + _IN_VAIN_S
        for _, history in self._needed(chosen, min(excess, freed)):
            self.pause(history, "mark")

    def pause(self, history: History, reason: str) -> None:
        assert history.home is not None
        self.prefetches.drop(history.id)
        self._paused_on[history.id] = (history.home, history.shared_tokens)
        self._emptied.get(history.home, {}).pop(history.id, None)
        freed_tokens = held_alone(history)
        self.pauses[reason] += 1
        self.paused_tokens += freed_tokens
        self._tell("pause", history, reason=reason, freed_tokens=freed_tokens)
        self._unbind(history, State.PAUSED)

    def _tell(self, kind: Kind, history: History, **details: Any) -> None:
        if self._events is not None:
            self._events.add(kind, history.id, decoder=history.home, **details)

    def _may_leave(self, decoder: Decoder, others: Iterable[Decoder]) -> Callable[[Idle], bool]:
        """Return a function that says in turn which may go, or fit on another decoder."""
        rooms = [
            int(self._policy.mark * other.capacity_tokens) - other.held_tokens
            for other in others
            if other.id != decoder.id
        ]

        def may_leave(one: Idle) -> bool:
            if self._policy.may_go(one):
                return True
            at = max(range(len(rooms)), key=rooms.__getitem__, default=None)
            if at is None or rooms[at] < one.held_tokens:
                return False
            rooms[at] -= one.held_tokens
            return True

        return may_leave

    def _enough(self, idle: Iterable[Idle], tokens: int) -> tuple[float, list[History]] | None:
        if tokens <= 0:
            return 0.0, []
        chosen, freed = self._cheapest(idle, tokens, lambda _: True)
        if freed < tokens:
            return None
        needed = self._needed(chosen, tokens)
        price = sum(self._policy.price(one) for one, _ in needed)
        return price, [history for _, history in needed]

    def _cheapest(
        self, idle: Iterable[Idle], tokens: int, may_go: Callable[[Idle], bool]
    ) -> tuple[list[tuple[Idle, History]], int]:
        """Return the cheapest histories that free so much, and how much they free."""
        # A shared beginning comes free with the last of its users.
        going = Going()
        chosen: list[tuple[Idle, History]] = []
        for one in self._policy.order(idle):
            if going.tokens >= tokens:
                break
            if not may_go(one):
                continue
            history = self._get(one.id)
            assert history is not None
            going.add(history)
            chosen.append((one, history))
        return chosen, going.tokens

    @staticmethod
    def _needed(chosen: list[tuple[Idle, History]], tokens: int) -> list[tuple[Idle, History]]:
        """Keep those without which the others free too little; the dearest are left out first."""
        going = Going()
        for _, history in chosen:
            going.add(history)
        needed = []
        for one, history in reversed(chosen):
            going.remove(history)
            if going.tokens < tokens:
                going.add(history)
                needed.append((one, history))
        return needed

    def _root(self, one: Idle) -> Digest | None:
        history = self._get(one.id)
        return None if history is None else history.root

    def _idle(
        self, now_s: float, decoder_ids: Iterable[str], most: int | None
    ) -> dict[str, list[Idle]]:
        """Return idle histories by decoder, of each at most the ``most`` longest unused."""
        found: list[History] = []
        idle: dict[str, list[Idle]] = {}
        for decoder_id in decoder_ids:
            idle[decoder_id] = []
            here = chain(self._emptied.get(decoder_id, ()), self._caches.get(decoder_id, ()))
            histories = (self._get(history_id) for history_id in here)
            held = (one for one in histories if one is not None and one.home == decoder_id)
            idle_here = (one for one in held if one.held_tokens and not one.running)
            found += islice(idle_here, most)
        # The longest idle first.
        found.sort(key=lambda one: one.last_used_s)
        waits = [self._wait(history) for history in found]
        # Idle times by what histories wait for; and all of them, for those where it is not known.
        alike: dict[tuple[str | None, bool], list[float]] = {}
        for wait in waits:
            idle_s = max(0.0, now_s - wait.since_s)
            for what in {(wait.tool, wait.tool_ended), (None, False)}:
                alike.setdefault(what, []).append(idle_s)
        for idle_for_s in alike.values():
            idle_for_s.sort()
        for history, wait in zip(found, waits, strict=True):
            assert history.home is not None
            idle_s = max(0.0, now_s - wait.since_s)
            idle_for_s = alike[wait.tool, wait.tool_ended]
            # Those idle for at least half as long, on the scale on which gaps differ.
            still_idle = len(idle_for_s) - bisect_left(idle_for_s, idle_s / 2) - 1
            idle[history.home].append(self._look_at(history, wait, idle_s, still_idle))
        return idle

    def _wait(self, history: History) -> Wait:
        return self._tools.wait(history.id, history.tool, history.last_used_s)

    def _look_at(self, history: History, wait: Wait, idle_s: float, still_idle: int) -> Idle:
        assert history.home is not None
        cache = self._caches[history.home]
        left_tokens = 0
        if history.id in cache:
            left_tokens = cache.left_tokens(history.id) + history.shared_tokens
        return Idle(
            history.id,
            history.held_tokens,
            held_alone(history),
            min(history.held_tokens, left_tokens),
            idle_s,
            still_idle,
            self._parked(history),
            wait.tool,
            wait.tool_ended,
            history.background,
            self._parents.waits(history),
            self._parents.is_taken_up(history),
        )

    def _parked(self, history: History) -> int:
        host = self._host
        # If all that is worked on fits, little of it is evicted before its next turn.
        fits = self.working.tokens <= host.capacity_tokens + self._engines_tokens()
        kept_s = 0.0 if fits else self._policy.kept_s
        return host.left_tokens(_key(history)) if host.keeps(_key(history), kept_s) else 0


def _own_tokens(history: History) -> int:
    """Return what a history holds beyond what it shares with others."""
    return history.held_tokens - history.shared_tokens


def _key(history: History) -> str:
    """Return a key that tells a history's KV from that of an earlier one with its id."""
    return history_key(history.id, history.incarnation)
