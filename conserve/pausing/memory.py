"""Where histories' KV is: on a decoder and counted, left there uncounted, or nowhere."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from conserve.conversation import Conversation
from conserve.histories.sharing import Going, held_alone
from conserve.pausing.cache import EngineCache
from conserve.pausing.policy import Idle, Pausing
from conserve.placement import Decoder, Shared

PAUSE_REASONS = ("room", "mark", "evicted")
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

    - ``room``: a prompt fits nowhere else, and no other way is as cheap,
    - ``mark``: running turns have grown, and its decoder holds more than it should, or
    - ``evicted``: so much was used there since that the engine cannot have it any more.

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
        # Of paused histories, the decoder that each was on; of others, those that they were on.
        self._paused_on: dict[str, str] = {}
        self._left: dict[str, set[str]] = {}
        self._forgotten: list[Forgotten] = []
        self.pauses: Counter[str] = Counter()
        self.restores: Counter[str] = Counter()
        self.paused_tokens = 0

    def __len__(self) -> int:
        """How many histories are paused."""
        return len(self._paused_on)

    def __contains__(self, history_id: str) -> bool:
        return history_id in self._paused_on

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
        own_tokens = history.held_tokens - (0 if history.base is None else history.base.tokens)
        for gone in cache.use(history.id, own_tokens):
            other = self._get(gone)
            if other is not None and other.decoder_id == decoder_id and not other.running:
                self._pause(other, "evicted")

    def evicted(self, histories: Iterable[Conversation]) -> None:
        """An engine was seen to have lost these: their next turns are no later turns to it."""
        for history in histories:
            if history.decoder_id is not None:
                self._caches[history.decoder_id].drop(history.id)
                self._pause(history, "evicted")

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
        prefillers_wait: bool = True,
    ) -> bool:
        """Pause idle histories of one decoder so that a prompt fits, where that costs least.

        Args:
            prefillers_wait: whether a prefiller has nothing to do. While all are busy, the prompt
                would only take the room earlier than it can use it; and those whose room it took
                would soon want to be prefilled too. So then only those go that are away for longer.

        Returns:
            Whether any was: False where running turns leave too little room, wherever it goes.
        """
        cheapest: tuple[float, list[Conversation]] | None = None
        for decoder in decoders:
            missing = shared.beyond(tokens, decoder.id) + decoder.held_tokens
            enough = self._enough(
                decoder, missing - decoder.capacity_tokens, now_s, only_away=not prefillers_wait
            )
            if enough is not None and (cheapest is None or enough[0] < cheapest[0]):
                cheapest = enough
        if cheapest is None:
            return False
        for history in cheapest[1]:
            self._pause(history, "room")
        return bool(cheapest[1])

    def relieve(self, decoder: Decoder, now_s: float) -> None:
        """Pause idle histories of a decoder until it holds no more than it should, or has none."""
        excess = self._policy.excess_tokens(decoder.held_tokens, decoder.capacity_tokens)
        if not excess:
            return
        enough = self._enough(decoder, excess, now_s)
        idle = self._idle(decoder.id) if enough is None else enough[1]
        for history in list(idle):
            self._pause(history, "mark")

    # --- inside ------------------------------------------------------------------------------

    def _enough(
        self, decoder: Decoder, tokens: int, now_s: float, only_away: bool = False
    ) -> tuple[float, list[Conversation]] | None:
        """The cheapest of its idle histories that free so much, and their cost; None if none do."""
        if tokens <= 0:
            return 0.0, []
        idle = {
            one.id: one
            for one in self._idle(decoder.id)
            if not only_away or self._policy.is_away(now_s - one.last_used_s)
        }
        # What several begin with goes with the last of them.
        ordered = self._policy.order(
            Idle(one.id, max(1, held_alone(one)), one.held_tokens, now_s - one.last_used_s)
            for one in idle.values()
        )
        going = Going()
        chosen: list[Idle] = []
        for one in ordered:
            if going.tokens >= tokens:
                break
            going.add(idle[one.id])
            chosen.append(one)
        if going.tokens < tokens:
            return None
        spare = going.tokens - tokens
        kept: list[Idle] = []
        # The last that was needed may have made others needless: the dearest of those stay.
        for one in reversed(chosen):
            if idle[one.id].base is None and one.held_tokens <= spare:
                spare -= one.held_tokens
            else:
                kept.append(one)
        cost = sum(self._policy.cost(one) * one.freed_tokens for one in kept)
        return cost, [idle[one.id] for one in reversed(kept)]

    def _idle(self, decoder_id: str) -> Iterator[Conversation]:
        for history_id in self._caches.get(decoder_id, ()):
            history = self._get(history_id)
            if history is not None and history.decoder_id == decoder_id and not history.running:
                yield history

    def _pause(self, history: Conversation, reason: str) -> None:
        assert history.decoder_id is not None
        self._paused_on[history.id] = history.decoder_id
        self.pauses[reason] += 1
        self.paused_tokens += held_alone(history)
        self._unbind(history)
