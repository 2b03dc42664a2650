"""Where histories' KV is: on a decoder and counted, left there uncounted, or nowhere."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from conserve.conversation import Conversation
from conserve.histories.sharing import Going, held_alone
from conserve.pausing.cache import EngineCache
from conserve.pausing.policy import Idle, Pausing
from conserve.placement import Decoder, Shared

# To look at all that is idle takes a microsecond each. After it was in vain, so long nobody looks.
_IN_VAIN_S = 0.5
PAUSE_REASONS = ("room", "mark")
RESTORES = ("kept", "moved", "again")


@dataclass(frozen=True, slots=True)
class Forgotten:
    """A history that is of no use any more to a decoder that it has left."""

    decoder_id: str
    history_id: str
    incarnation: int


class Memory:
    """Pauses idle histories, and knows where they may still be found.

    A *paused* history is bound to no decoder and counts nowhere; its next turn is placed anew. What
    its decoder has of it stays there until the engine needs the room. It is paused because

    - ``room``: it is away, and a prompt fits nowhere, or
    - ``mark``: running turns have grown, its decoder holds more than it should, and it is away, or
      would fit on another one.

    Args:
        policy: says in which order.
        decoders: the table's, by id.
        get: the live history of an id.
        unbind: has a history count nowhere.

    Attributes:
        pauses: how many, by reason.
        paused_tokens: what they were counted with.
        restores: how many came back: ``kept`` to the decoder that has them yet, ``moved`` to
            another one, ``again`` to the same one, to be computed anew.
    """

    def __init__(
        self,
        policy: Pausing,
        decoders: Mapping[str, Decoder],
        get: Callable[[str], Conversation | None],
        unbind: Callable[[Conversation], None],
    ) -> None:
        self._policy = policy
        self._decoders = decoders
        self._get = get
        self._unbind = unbind
        self._caches: dict[str, EngineCache] = {}
        # Histories that had a turn on a decoder; those that are there no more go when it is looked.
        self._seen_on: dict[str, dict[str, None]] = {}
        # Of paused histories, the decoder that each was on; of others, those that they were on.
        self._paused_on: dict[str, str] = {}
        self._left: dict[str, set[str]] = {}
        self._forgotten: list[Forgotten] = []
        # Until when nobody looks whether a decoder can be relieved, or (None) room be made.
        self._in_vain: dict[str | None, float] = {}
        self.pauses: Counter[str] = Counter()
        self.restores: Counter[str] = Counter()
        self.paused_tokens = 0

    @property
    def paused(self) -> int:
        """How many histories are paused."""
        return len(self._paused_on)

    # --- what happens to histories -----------------------------------------------------------

    def turn_begins(self, history: Conversation, idle_s: float | None) -> None:
        """A turn of a bound history begins.

        Args:
            idle_s: the time since its last one; None if it had none.
        """
        if idle_s is not None:
            self._policy.gaps.returned(idle_s)
        self.used(history)

    def used(self, history: Conversation) -> None:
        """A turn of a bound history begins, or has ended: its decoder has what it holds."""
        decoder_id = history.decoder_id
        if decoder_id is None:
            return
        cache = self._caches.get(decoder_id)
        if cache is None:
            cache = EngineCache(self._decoders[decoder_id].capacity_tokens)
            self._caches[decoder_id] = cache
            self._seen_on[decoder_id] = {}
        own_tokens = history.held_tokens - (0 if history.base is None else history.base.tokens)
        cache.use(history.id, own_tokens)
        self._seen_on[decoder_id][history.id] = None

    def lost(self, histories: Iterable[Conversation]) -> None:
        """An engine was seen to have nothing of these any more."""
        for history in histories:
            if history.decoder_id in self._caches:
                self._caches[history.decoder_id].drop(history.id)

    def bound(self, history: Conversation, kept: bool) -> bool:
        """A history that was bound nowhere is bound now.

        Args:
            kept: its decoder is to go on with what it has of it.

        Returns:
            Whether it has moved: it comes to another decoder.
        """
        was_on = self._paused_on.pop(history.id, None)
        if was_on is None:
            return True
        if was_on != history.decoder_id:
            self._left.setdefault(history.id, set()).add(was_on)
            self.restores["moved"] += 1
            return True
        self.restores["kept" if kept else "again"] += 1
        return False

    def expired(self, idle_s: float) -> None:
        """A history is about to end, since no turn came for so long."""
        self._policy.gaps.ended(idle_s)

    def ended(self, history: Conversation) -> None:
        """A history has ended: decoders that it was on before may forget it."""
        left = self._left.pop(history.id, set())
        was_on = self._paused_on.pop(history.id, None)
        if was_on is not None:
            left.add(was_on)
        self._forgotten += [
            Forgotten(decoder_id, history.id, history.incarnation)
            for decoder_id in sorted(left)
            if decoder_id in self._decoders and decoder_id != history.decoder_id
        ]

    def found_on(self, history: Conversation) -> None:
        """A history turns out to be on its decoder still, wherever it was thought to be."""
        was_on = self._paused_on.pop(history.id, None)
        if was_on is not None and was_on != history.decoder_id:
            self._left.setdefault(history.id, set()).add(was_on)

    def moved_from(self, history: Conversation) -> None:
        """A history turns out to be on another decoder by now than the one that it is bound to."""
        assert history.decoder_id is not None
        self._left.setdefault(history.id, set()).add(history.decoder_id)

    def decoder_lost(self, decoder_id: str) -> None:
        """A decoder is gone, with all that it had."""
        self._caches.pop(decoder_id, None)
        self._seen_on.pop(decoder_id, None)
        self._in_vain.pop(decoder_id, None)

    def take_forgotten(self) -> list[Forgotten]:
        """What decoders may forget, since they were asked last."""
        forgotten, self._forgotten = self._forgotten, []
        return forgotten

    def left_on(self, decoder_id: str) -> set[str]:
        """Ids of live histories that were on this decoder, and are paused or have moved."""
        paused = {id for id, was_on in self._paused_on.items() if was_on == decoder_id}
        return paused | {id for id, decoders in self._left.items() if decoder_id in decoders}

    # --- decisions ---------------------------------------------------------------------------

    def found(self, history_id: str, shared: Shared) -> Shared:
        """Where a paused history may still be, beside what it shares with others."""
        was_on = self._paused_on.get(history_id, "")
        left_tokens = self._caches[was_on].left_tokens(history_id) if was_on in self._caches else 0
        if not left_tokens:
            return shared
        return replace(shared, left_on=was_on, left_tokens=left_tokens)

    def make_room(
        self,
        tokens: int,
        decoders: Iterable[Decoder],
        shared: Shared,
        now_s: float,
        waited_s: float | None = None,
    ) -> bool:
        """Pause histories of one decoder that are away, so that a prompt fits.

        It is done where it costs least, and just as many go as it takes.

        Args:
            waited_s: of a history that was paused, how long its turn has waited already. In the
                end, or while no turn runs anywhere, whatever is idle may go for it. None: of a new
                one, for which those who work already give up nothing.

        Returns:
            Whether any was: False where others leave too little room, wherever the prompt goes.
        """
        if now_s < self._in_vain.get(None, now_s):
            return False
        cheapest: tuple[float, list[Conversation]] | None = None
        idle, any_runs = self._idle(now_s)
        only_away = waited_s is None or (any_runs and waited_s < self._policy.patience_s)
        for decoder in decoders:
            held_tokens = shared.beyond(tokens, decoder.id) + decoder.held_tokens
            may_go = idle.get(decoder.id, [])
            if only_away:
                may_go = [one for one in may_go if self._policy.is_away(one)]
            enough = self._enough(may_go, held_tokens - decoder.capacity_tokens)
            if enough is not None and (cheapest is None or enough[0] < cheapest[0]):
                cheapest = enough
        if cheapest is None:
            self._in_vain[None] = now_s + _IN_VAIN_S
            return False
        for history in cheapest[1]:
            self._pause(history, "room")
        return bool(cheapest[1])

    def relieve(self, decoder: Decoder, others: Iterable[Decoder], now_s: float) -> None:
        """Pause idle histories of a decoder that holds more than it should, until it does not.

        Args:
            others: decoders that histories may move to.
        """
        excess = self._policy.excess_tokens(decoder.held_tokens, decoder.capacity_tokens)
        if not excess or now_s < self._in_vain.get(decoder.id, now_s):
            return
        room_tokens = max(
            (
                int(self._policy.mark * other.capacity_tokens) - other.held_tokens
                for other in others
                if other.id != decoder.id
            ),
            default=0,
        )
        may_go = [
            one
            for one in self._idle(now_s)[0].get(decoder.id, ())
            if one.held_tokens <= room_tokens or self._policy.is_away(one)
        ]
        enough = self._enough(may_go, excess)
        if enough is None:
            self._in_vain[decoder.id] = now_s + _IN_VAIN_S
        going = [self._get(one.id) for one in may_go] if enough is None else enough[1]
        for history in going:
            assert history is not None
            self._pause(history, "mark")

    # --- inside ------------------------------------------------------------------------------

    def _enough(self, idle: Iterable[Idle], tokens: int) -> tuple[float, list[Conversation]] | None:
        """The cheapest of these that free so much, and their cost; None if all free less."""
        if tokens <= 0:
            return 0.0, []
        # What several begin with goes with the last of them.
        going = Going()
        chosen: list[tuple[Idle, Conversation]] = []
        for one in self._policy.order(idle):
            if going.tokens >= tokens:
                break
            history = self._get(one.id)
            assert history is not None
            going.add(history)
            chosen.append((one, history))
        if going.tokens < tokens:
            return None
        spare = going.tokens - tokens
        needed: list[Conversation] = []
        cost = 0.0
        # The last that was chosen may have made others needless: the dearest of those stay.
        for one, history in reversed(chosen):
            if history.base is None and one.held_tokens <= spare:
                spare -= one.held_tokens
            else:
                needed.append(history)
                cost += self._policy.cost(one) * one.freed_tokens
        return cost, needed

    def _idle(self, now_s: float) -> tuple[dict[str, list[Idle]], bool]:
        """Histories of which no turn runs, by decoder; and whether a turn of any other does."""
        found: list[Conversation] = []
        any_runs = False
        for decoder_id, seen in self._seen_on.items():
            here = [(id, self._get(id)) for id in seen]
            for history_id, history in here:
                if history is None or history.decoder_id != decoder_id:
                    del seen[history_id]
                elif history.running:
                    any_runs = True
                elif history.held_tokens:
                    found.append(history)
        # The longest idle first.
        found.sort(key=lambda one: one.last_used_s)
        idle: dict[str, list[Idle]] = {decoder_id: [] for decoder_id in self._seen_on}
        idle_for_s = [now_s - one.last_used_s for one in reversed(found)]
        for history in found:
            assert history.decoder_id is not None
            # About as long, on the scale on which gaps differ.
            shorter = bisect_left(idle_for_s, (now_s - history.last_used_s) / 2)
            still_idle = len(found) - shorter - 1
            idle[history.decoder_id].append(self._look_at(history, now_s, still_idle))
        return idle, any_runs

    def _look_at(self, history: Conversation, now_s: float, still_idle: int) -> Idle:
        assert history.decoder_id is not None
        shared_tokens = 0 if history.base is None else history.base.tokens
        own_tokens = self._caches[history.decoder_id].left_tokens(history.id)
        return Idle(
            history.id,
            history.held_tokens,
            held_alone(history),
            min(history.held_tokens, own_tokens + (shared_tokens if own_tokens else 0)),
            now_s - history.last_used_s,
            still_idle,
        )

    def _pause(self, history: Conversation, reason: str) -> None:
        assert history.decoder_id is not None
        self._paused_on[history.id] = history.decoder_id
        self.pauses[reason] += 1
        self.paused_tokens += held_alone(history)
        self._unbind(history)
