"""Follows where histories' KV is: on a decoder and counted, left there uncounted, or nowhere."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

from conserve.events import EventLog, Kind
from conserve.histories.sharing import Going, held_alone
from conserve.history import History, TurnStats
from conserve.holdings import Parked
from conserve.pausing.cache import EngineCache
from conserve.pausing.host import HostMemory
from conserve.pausing.policy import Idle, Pausing
from conserve.pausing.tools import RunningTools, Wait
from conserve.placement import Decoder, Shared
from conserve.recognition import Digest

# To look at an idle history takes some microseconds: of each decoder so many are looked at, those
# that were unused for longest; and all where these are not enough. After that was in vain, nobody
# looks for so long.
_LOOKED_AT = 256
_IN_VAIN_S = 0.5
PAUSE_REASONS = ("room", "mark")
RESTORES = ("kept", "reloaded", "moved", "again")


@dataclass(frozen=True, slots=True)
class Forgotten:
    """A history that is of no use any more to a decoder that it has left."""

    decoder_id: str
    history_id: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Hold:
    """For how long a decoder's engine is to hold what it has of a history, from now on."""

    history_id: str
    incarnation: int
    for_s: float


class Memory:
    """Pauses idle histories, and knows where they may still be found.

    A *paused* history is bound to no decoder and counts nowhere; its next turn is placed anew. What
    its decoder has of it stays there until the engine needs the room. It is paused because

    - ``room``: it is away or parked, and a prompt fits nowhere, or
    - ``mark``: running turns have grown, and its decoder holds more than it should.

    A *parked* history is one of which host memory has a copy, since a turn left it there on a
    decoder that was filling up (`park`), whether it is paused or not.

    Args:
        policy: says in which order.
        decoders: the table's, by id.
        get: the live history of an id.
        unbind: has a history count nowhere.
        events: is told who is parked, paused and back.
        tools: which run, as clients report it.

    Attributes:
        pauses: how many, by reason.
        paused_tokens: what they were counted with.
        restores: how many came back: ``kept`` to the decoder that has them yet, ``reloaded`` from
            host memory, wherever they went, ``moved`` to another decoder and ``again`` to the same
            one, to be computed anew.
    """

    def __init__(
        self,
        policy: Pausing,
        decoders: Mapping[str, Decoder],
        get: Callable[[str], History | None],
        unbind: Callable[[History], None],
        events: EventLog | None = None,
        tools: RunningTools | None = None,
    ) -> None:
        self._policy = policy
        self._tools = RunningTools() if tools is None else tools
        self._decoders = decoders
        self._get = get
        self._unbind = unbind
        self._events = events
        self._caches: dict[str, EngineCache] = {}
        # What is parked, and which turns are to leave theirs: none without host memory.
        self._host: HostMemory | None = None
        self._parking: set[int] = set()
        # Histories that are bound to a decoder whose engine should have nothing of them any more.
        self._emptied: dict[str, dict[str, None]] = {}
        # Of paused histories, the decoder that each was on, and what it began with there as others
        # did; and of all, the decoders that they were on and have a record of them.
        self._paused_on: dict[str, tuple[str, int]] = {}
        self._left: dict[str, set[str]] = {}
        self._forgotten: list[Forgotten] = []
        # Of decoders that ask: histories of which a turn has ended since they were told last.
        self._rested: dict[str, dict[str, None]] = {}
        # Until when nobody looks whether a decoder can be relieved; or whether room can be made by
        # those that are away, or by all, and for how many tokens or more.
        self._in_vain: dict[str, float] = {}
        self._no_room: dict[bool, tuple[float, int]] = {}
        self.pauses: Counter[str] = Counter()
        self.restores: Counter[str] = Counter()
        self.paused_tokens = 0

    @property
    def paused(self) -> int:
        """How many histories are paused."""
        return len(self._paused_on)

    @property
    def parked_tokens(self) -> int:
        """How many tokens host memory has, as far as is known."""
        return 0 if self._host is None else self._host.tokens

    def parked_of(self, history: History) -> int:
        """How many tokens of a history host memory has now, from its beginning on."""
        return 0 if self._host is None else self._host.left_tokens(_key(history))

    def set_host_tokens(self, tokens: int) -> None:
        """Host memory has room for so many tokens from now on; 0: nothing is parked."""
        if self._host is not None:
            self._host.resize(tokens)
        if not tokens:
            self._host = None
        elif self._host is None:
            self._host = HostMemory(tokens)

    # --- what happens to histories -----------------------------------------------------------

    def turn_begins(self, history: History, came_s: float | None) -> None:
        """A turn of a bound history begins.

        Args:
            came_s: when it came; None if the history was not idle, or had none before.
        """
        if came_s is not None:
            wait = self._wait(history)
            policy = self._policy
            gaps = policy.resumes if wait.tool_ended else policy.gaps
            gaps.returned(came_s - wait.since_s, wait.tool)
        self.used(history)

    def used(self, history: History) -> None:
        """A turn of a bound history begins, or has ended: its decoder has what it holds."""
        decoder_id = history.decoder_id
        if decoder_id is None:
            return
        cache = self._caches.get(decoder_id)
        if cache is None:
            cache = EngineCache(self._decoders[decoder_id].capacity_tokens)
            self._caches[decoder_id] = cache
            self._emptied[decoder_id] = {}
        base = history.base
        gone = cache.use(history.id, history.held_tokens - (0 if base is None else base.tokens))
        emptied = self._emptied[decoder_id]
        if emptied:
            emptied.pop(history.id, None)
        for history_id in gone:
            other = self._get(history_id)
            if other is not None and other.decoder_id == decoder_id:
                emptied[history_id] = None

    def park(self, history: History) -> bool:
        """Whether the turn that it has begun last is to leave its KV in host memory too."""
        if not self.parks_on(history.decoder_id or ""):
            return False
        self._parking.add(history.running[-1])
        return True

    def parks_on(self, decoder_id: str) -> bool:
        """Whether turns that begin on a decoder leave their KV in host memory too."""
        decoder = self._decoders[decoder_id]
        if self._host is None:
            return False
        return self._policy.parks(decoder.held_tokens, decoder.capacity_tokens)

    def parks_turn(self, turn_id: int) -> None:
        """A turn is to leave its KV in host memory: its decoder has had it do so."""
        if self._host is not None:
            self._parking.add(turn_id)

    def turn_ended(self, history: History, turn_id: int, stats: TurnStats | None) -> None:
        """A turn of a history has ended.

        Args:
            stats: what the engine did; None if it did not get there.
        """
        if (rested := self._rested.get(history.decoder_id or "")) is not None:
            rested[history.id] = None
        parking = turn_id in self._parking
        self._parking.discard(turn_id)
        # One that was cut before it put anything out may not have been computed, nor looked up.
        if stats is None or not stats.output_tokens or self._host is None:
            return
        if stats.misses(self._host.left_tokens(_key(history))):
            self._host.drop(_key(history))
        elif stats.lmcache_tokens and _key(history) in self._host:
            self.parked(history, 0)
        if parking:
            # What is put out is left there with the next turn's prompt.
            self.parked(history, stats.prompt_tokens)
            self._tell("park", history, tokens=stats.prompt_tokens)

    def parked(self, history: History, tokens: int) -> None:
        """Host memory has so much of a history now, from its beginning on, or more."""
        if self._host is not None:
            shared_tokens = 0 if history.base is None else history.base.tokens
            self._host.use(_key(history), tokens, history.last_used_s, shared_tokens)

    def take_over(self, parked: Iterable[Parked]) -> None:
        """A decoder tells a new table what host memory should have of histories on it."""
        if self._host is None:
            return
        uses = []
        for one in parked:
            history = self._get(one.id)
            if history is not None and history.incarnation == one.incarnation:
                shared_tokens = 0 if history.base is None else history.base.tokens
                uses.append((_key(history), one.tokens, one.at_s, shared_tokens))
        if uses:
            self._host.take_over(uses)

    def turns_lost(self, turn_ids: Iterable[int]) -> None:
        """Forget turns whose end nobody will tell."""
        self._parking.difference_update(turn_ids)

    def lost(self, histories: Iterable[History]) -> None:
        """An engine was seen to have nothing of these any more."""
        for history in histories:
            if history.decoder_id in self._caches:
                self._caches[history.decoder_id].drop(history.id)
                self._emptied[history.decoder_id][history.id] = None

    def bound(self, history: History, kept: bool) -> bool:
        """A history that was bound nowhere is bound now.

        Args:
            kept: its decoder is to go on with what it, or host memory, has of it.

        Returns:
            Whether it has moved: it comes to another decoder.
        """
        was_on, _ = self._paused_on.pop(history.id, (None, 0))
        there = 0 if self._host is None else self._host.left_tokens(_key(history))
        if was_on is None:
            # Its decoder was lost, or has left.
            self._tell("restore", history, where="reloaded" if kept and there else "unbound")
            return True
        # Should this turn come to nothing, the decoder has its record of it yet.
        self._left.setdefault(history.id, set()).add(was_on)
        moved = was_on != history.decoder_id
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

    def expired(self, history: History, now_s: float) -> None:
        """A history is about to end, since no turn came for so long."""
        self._policy.gaps.ended(now_s - history.last_used_s, history.tool)

    def ended(self, history: History) -> None:
        """A history has ended: decoders that it was on before may forget it."""
        self.turns_lost(history.running)
        left = self._left.pop(history.id, set())
        was_on, _ = self._paused_on.pop(history.id, (None, 0))
        if was_on is not None:
            left.add(was_on)
        if history.decoder_id is not None:
            self._emptied.get(history.decoder_id, {}).pop(history.id, None)
        self._forgotten += [
            Forgotten(decoder_id, history.id, history.incarnation)
            for decoder_id in sorted(left)
            if decoder_id in self._decoders and decoder_id != history.decoder_id
        ]

    def found_on(self, history: History) -> None:
        """A history turns out to be on its decoder still, wherever it was thought to be."""
        was_on, _ = self._paused_on.pop(history.id, (None, 0))
        if was_on is not None and was_on != history.decoder_id:
            self._left.setdefault(history.id, set()).add(was_on)

    def moved_from(self, history: History) -> None:
        """A history turns out to be on another decoder by now than the one that it is bound to."""
        assert history.decoder_id is not None
        self._left.setdefault(history.id, set()).add(history.decoder_id)

    def decoder_lost(self, decoder_id: str) -> None:
        """A decoder is gone, with all that it had."""
        self._caches.pop(decoder_id, None)
        self._emptied.pop(decoder_id, None)
        self._in_vain.pop(decoder_id, None)
        self._rested.pop(decoder_id, None)

    def take_holds(self, decoder_id: str, now_s: float) -> list[Hold]:
        """How long a decoder's engine is to hold the histories that have come to rest there since
        it was asked last.

        Of those whose client has said when the next turn comes, or that none does, its engine knows
        by itself.
        """
        holds = []
        rested, self._rested[decoder_id] = self._rested.get(decoder_id, {}), {}
        for history_id in rested:
            history = self._get(history_id)
            if history is None or history.decoder_id != decoder_id or history.running:
                continue
            said = history.hints
            if said is not None and (said.expected_resume_s is not None or said.last_step):
                continue
            wait = self._wait(history)
            for_s = self._policy.hold_s(wait.tool) - max(0.0, now_s - history.last_used_s)
            holds.append(Hold(history_id, history.incarnation, max(0.0, for_s)))
        return holds

    def take_forgotten(self) -> list[Forgotten]:
        """Take the histories that decoders may forget, since this was called last."""
        forgotten, self._forgotten = self._forgotten, []
        return forgotten

    def left_on(self, decoder_id: str) -> set[str]:
        """Ids of live histories that were on this decoder, and are paused or have moved."""
        paused = {id for id, (was_on, _) in self._paused_on.items() if was_on == decoder_id}
        return paused | {id for id, decoders in self._left.items() if decoder_id in decoders}

    def paused_on(self, history_id: str) -> str | None:
        """The decoder that a paused history was on; None if it is not paused."""
        return self._paused_on.get(history_id, (None, 0))[0]

    # --- decisions ---------------------------------------------------------------------------

    def found(self, history_id: str, shared: Shared) -> Shared:
        """Return where a history that is bound nowhere may still be, beside what it shares with
        others.
        """
        history = self._get(history_id)
        if self._host is not None and history is not None and _key(history) in self._host:
            shared = replace(shared, parked_tokens=self._host.left_tokens(_key(history)))
        was_on, shared_tokens = self._paused_on.get(history_id, ("", 0))
        cache = self._caches.get(was_on)
        if cache is None or history_id not in cache:
            return shared
        left_tokens = cache.left_tokens(history_id) + shared_tokens
        return replace(shared, left_on=was_on, left_tokens=left_tokens)

    def make_room(
        self,
        tokens: int,
        decoders: Sequence[Decoder],
        shared: Shared,
        now_s: float,
        waited_s: float | None = None,
        root: Digest | None = None,
        any_runs: bool = True,
    ) -> bool:
        """Pause histories of one decoder that are away or parked, so that a prompt fits.

        It is done where it costs least, and just as many go as it takes.

        Args:
            waited_s: of a history that was paused, how long its turn has waited already. In the
                end, or while no turn runs anywhere, whatever is idle may go for it. None: of a new
                one, for which those who work already give up nothing.
            root: of the prompt: those that begin with it stay, where that is enough.
            any_runs: whether a turn runs anywhere.

        Returns:
            Whether any was: False where others leave too little room, wherever the prompt goes.
        """
        patience_s = self._policy.patience_s
        anybody = waited_s is not None and (not any_runs or waited_s >= patience_s)
        until_s, at_least = self._no_room.get(anybody, (now_s, 0))
        if now_s < until_s and tokens >= at_least:
            return False
        cheapest: tuple[float, list[History]] | None = None
        for most in (_LOOKED_AT, None):
            idle = self._idle(now_s, [one.id for one in decoders], most)
            for decoder in decoders:
                may_go = idle[decoder.id]
                if not anybody:
                    may_go = [one for one in may_go if self._policy.may_go(one)]
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
            self._no_room[anybody] = (now_s + _IN_VAIN_S, tokens)
            return False
        for history in cheapest[1]:
            self.pause(history, "room")
        return bool(cheapest[1])

    def relieve(self, decoder: Decoder, others: Collection[Decoder], now_s: float) -> None:
        """Pause idle histories of a decoder that holds more than it should.

        First those that may go, or find a place elsewhere. If that is not enough, whoever is idle:
        where more are bound than fit, each finds that the others have pushed it out, and all are
        computed again and again (ThunderAgent, section 4.3).

        Args:
            others: decoders that histories may move to.
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
        """Have an idle history give up its room."""
        assert history.decoder_id is not None
        shared_tokens = 0 if history.base is None else history.base.tokens
        self._paused_on[history.id] = (history.decoder_id, shared_tokens)
        self._emptied.get(history.decoder_id, {}).pop(history.id, None)
        freed_tokens = held_alone(history)
        self.pauses[reason] += 1
        self.paused_tokens += freed_tokens
        self._tell("pause", history, reason=reason, freed_tokens=freed_tokens)
        self._unbind(history)

    # --- inside ------------------------------------------------------------------------------

    def _tell(self, kind: Kind, history: History, **details: Any) -> None:
        if self._events is not None:
            self._events.add(kind, history.id, decoder=history.decoder_id, **details)

    def _may_leave(self, decoder: Decoder, others: Iterable[Decoder]) -> Callable[[Idle], bool]:
        """Says, one after the other, who may go, or finds a place at another decoder."""
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
        """The cheapest of these that free so much, and their price; None if all free less."""
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
        """The cheapest first, until they free so much; and how much they free."""
        # What several begin with goes with the last of them.
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
        """Choose those without whom the others free less than that: the dearest stay, where they
        can.
        """
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
        """Histories of which no turn runs, by decoder.

        Args:
            most: of each decoder, so many that were unused for longest; None: all.
        """
        found: list[History] = []
        idle: dict[str, list[Idle]] = {}
        for decoder_id in decoder_ids:
            idle[decoder_id] = []
            here = chain(self._emptied.get(decoder_id, ()), self._caches.get(decoder_id, ()))
            histories = (self._get(history_id) for history_id in here)
            idle_here = (
                one
                for one in histories
                if one is not None
                and one.decoder_id == decoder_id
                and one.held_tokens
                and not one.running
            )
            found += islice(idle_here, most)
        # The longest idle first.
        found.sort(key=lambda one: one.last_used_s)
        waits = [self._wait(history) for history in found]
        # Who waits for the same, by how long; and everybody, for those of whom that is not known.
        alike: dict[tuple[str | None, bool], list[float]] = {}
        for wait in waits:
            idle_s = max(0.0, now_s - wait.since_s)
            for what in {(wait.tool, wait.tool_ended), (None, False)}:
                alike.setdefault(what, []).append(idle_s)
        for idle_for_s in alike.values():
            idle_for_s.sort()
        for history, wait in zip(found, waits, strict=True):
            assert history.decoder_id is not None
            idle_s = max(0.0, now_s - wait.since_s)
            idle_for_s = alike[wait.tool, wait.tool_ended]
            # About as long, on the scale on which gaps differ.
            still_idle = len(idle_for_s) - bisect_left(idle_for_s, idle_s / 2) - 1
            idle[history.decoder_id].append(self._look_at(history, wait, idle_s, still_idle))
        return idle

    def _wait(self, history: History) -> Wait:
        return self._tools.wait(history.id, history.tool, history.last_used_s)

    def _look_at(self, history: History, wait: Wait, idle_s: float, still_idle: int) -> Idle:
        assert history.decoder_id is not None
        cache = self._caches[history.decoder_id]
        shared_tokens = 0 if history.base is None else history.base.tokens
        left_tokens = 0
        if history.id in cache:
            left_tokens = min(history.held_tokens, cache.left_tokens(history.id) + shared_tokens)
        return Idle(
            history.id,
            history.held_tokens,
            held_alone(history),
            left_tokens,
            idle_s,
            still_idle,
            self._parked(history),
            wait.tool,
            wait.tool_ended,
        )

    def _parked(self, history: History) -> int:
        """How much of it host memory has, and will have for a while."""
        if self._host is None or not self._host.keeps(_key(history), self._policy.kept_s):
            return 0
        return self._host.left_tokens(_key(history))


def _key(history: History) -> str:
    """Tells a history's KV from that of an earlier one of its id, which may be there yet."""
    return f"{history.incarnation} {history.id}"
