"""Counts what decoders hold and tenants have of live histories, and how many are at work."""

from collections import OrderedDict
from collections.abc import Callable
from itertools import islice

from conserve import identity
from conserve.conversations.engines import Engines
from conserve.direct.notices import Notices
from conserve.histories.groups import Groups
from conserve.histories.kinship import Kinship
from conserve.histories.points import mark
from conserve.history import History
from conserve.pausing import RunningTools
from conserve.recognition import Chain
from conserve.tenants.usage import TenantUsage, UsageBook

# The most histories with the same newest tail that are looked at.
_LOOKED_AT = 256


class LiveHistories:
    """Finds live histories.

    Args:
        charge: for `Kinship`.

    Attributes:
        by_id: all of them; changed by `add` and `remove` alone.
        kinship: what they have in common.
    """

    def __init__(self, charge: Callable[[History, int], None]) -> None:
        self.by_id: dict[str, History] = {}
        self.kinship = Kinship(self.by_id.get, charge)
        self._families = self.kinship.families
        self._groups = Groups()

    def add(self, history: History) -> bool:
        """A history lives from now on; returns whether it is the first of its conversation."""
        is_first = self._groups.add(history.id, self.by_id)
        self.by_id[history.id] = history
        self._families.join(history)
        return is_first

    def remove(self, history: History) -> bool:
        """It does not any more; returns whether it was the last of its conversation."""
        del self.by_id[history.id]
        self._families.leave(history)
        return self._groups.discard(history.id, self.by_id)

    def current(self, history_id: str, incarnation: int) -> History | None:
        """The live history of this id, if it is of this incarnation."""
        history = self.by_id.get(history_id)
        if history is None or history.incarnation != incarnation:
            return None
        return history

    # --- of one conversation -----------------------------------------------------------------

    def histories(self, conversation_id: str) -> list[History]:
        """See `ConversationTable.histories`."""
        return [self.by_id[id] for id in self._groups.of(conversation_id, self.by_id)]

    def siblings(self, history_id: str) -> list[History]:
        """The other histories of a conversation that was named."""
        conversation_id = identity.conversation_of(history_id)
        return [one for one in self.histories(conversation_id) if one.id != history_id]

    def lives(self, history_id: str) -> bool:
        """See `ConversationTable.lives`."""
        return self._groups.lives(history_id, self.by_id)

    def has_several(self, history_id: str) -> bool:
        """See `ConversationTable.has_several`."""
        return self._groups.has_further(identity.conversation_of(history_id))

    @property
    def conversations(self) -> int:
        """How many conversations the live histories are of."""
        return len(self.by_id) - self._groups.beyond_one(self.by_id)

    # --- by a turn's messages ----------------------------------------------------------------

    def recognise(self, chain: Chain, conversation_id: str | None) -> str | None:
        """See `ConversationTable.recognise`."""
        if conversation_id is not None and identity.is_generated(conversation_id):
            # Its client states the id that it was given: no twin will do.
            own = [one for one in self.histories(conversation_id) if one.root == chain.root]
            for end in (*chain.ends, chain.root):
                those = [one for one in own if mark(end) in one.tails]
                if those:
                    return next((one.id for one in those if not one.running), None)
            return None
        return self._families.match(chain, conversation_id)

    def to_be_heard(self, chain: Chain, conversation_id: str | None) -> set[str]:
        """See `ConversationTable.to_be_heard`."""
        if not chain.ends:
            return set()
        before = islice(self._families.before(chain, conversation_id), _LOOKED_AT)
        running = (one.decoder_id for one in before if one.running)
        return {decoder_id for decoder_id in running if decoder_id is not None}


RECENT_S = 30.0
"""Whoever's last turn ended no longer ago is at work: it is with its tools."""


class Activity:
    """Bound histories of which no turn runs, and of which one did a moment ago.

    Nothing is kept of those that have been idle for longer, so of a million histories it is as many
    as have a turn in `RECENT_S`.

    Example:
        >>> activity = Activity()
        >>> activity.idle("a", now_s=0.0)
        >>> activity.idle("b", now_s=20.0)
        >>> activity.acting(25.0), activity.acting(40.0)
        (2, 1)
        >>> activity.not_idle("b")
        >>> activity.acting(40.0)
        0
    """

    def __init__(self) -> None:
        # When each became idle, the first one first.
        self._idle_s: OrderedDict[str, float] = OrderedDict()

    def idle(self, history_id: str, now_s: float) -> None:
        """The last of a history's running turns has ended."""
        self._idle_s[history_id] = now_s
        self._idle_s.move_to_end(history_id)
        self._forget(now_s)

    def not_idle(self, history_id: str) -> None:
        """A turn of it runs, or it is bound nowhere, or has ended."""
        self._idle_s.pop(history_id, None)

    def acting(self, now_s: float) -> int:
        """How many there are."""
        self._forget(now_s)
        return len(self._idle_s)

    def _forget(self, now_s: float) -> None:
        while self._idle_s:
            history_id, since_s = next(iter(self._idle_s.items()))
            if now_s - since_s < RECENT_S:
                break
            del self._idle_s[history_id]


class Ledger:
    """Counts what histories hold, where they are bound, and which of their turns run.

    Whatever changes one of these changes it here, so that they always agree.

    Args:
        engines: their decoders' occupancy is kept.

    Attributes:
        live: the histories.
        reasoning: of how many a turn runs.
        usage: what each tenant has.
        tools: which run, as clients report it.
        notices: what decoders are told that begin turns by themselves.
    """

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

    # --- histories ---------------------------------------------------------------------------

    def add(self, history: History, usage: TenantUsage) -> None:
        """A history lives from now on, and the turns run that it comes with.

        What it holds is not counted yet.

        Args:
            usage: its tenant's.
        """
        usage.conversations += self.live.add(history)
        usage.histories += 1
        if history.running:
            usage.turns += len(history.running)
            self.reasoning += 1

    def take_out(self, history_id: str) -> History | None:
        """A history counts nowhere any more; None if it is unknown."""
        history = self.live.by_id.get(history_id)
        if history is None:
            return None
        self.tools.forget(history_id)
        self._engines.leave_queue(history)
        self._engines.left(history)
        if history.decoder_id is not None:
            self._sharing.hold(history, 0)
            self._decoders[history.decoder_id].conversations -= 1
        usage = self.usage.of(history_id)
        usage.conversations -= self.live.remove(history)
        usage.histories -= 1
        usage.turns -= len(history.running)
        if history.running:
            self.reasoning -= 1
        self._activity.not_idle(history.id)
        return history

    # --- where they are bound, and what they hold --------------------------------------------

    def bind(self, history: History, decoder_id: str, tokens: int) -> None:
        """A history that was bound nowhere is bound to this decoder, and holds so much there."""
        history.decoder_id = decoder_id
        self._decoders[decoder_id].conversations += 1
        self._sharing.hold(history, tokens)

    def hold(self, history: History, tokens: int) -> None:
        """A history holds so much now, if it is bound."""
        if history.decoder_id is not None:
            self._sharing.hold(history, tokens)

    def unbind(self, history: History) -> None:
        """A history is bound nowhere, and its decoder is told so."""
        self._engines.left(history)
        if history.decoder_id is not None:
            self._sharing.hold(history, 0)
            self._decoders[history.decoder_id].conversations -= 1
            self.give_up(history)
        history.decoder_id = None
        history.promised = False
        self._activity.not_idle(history.id)

    def give_up(self, history: History, *, ended: bool = False) -> None:
        """Tell a history's decoder that it has it no more, or that it has ended."""
        if history.decoder_id is not None:
            self.notices.give_up(history.decoder_id, history.id, history.incarnation, ended=ended)

    def lose(self, history: History) -> None:
        """A history's decoder is lost, and with it all its turns."""
        self._sharing.hold(history, 0)
        self.usage.of(history.id).turns -= len(history.running)
        history.decoder_id = None
        self._activity.not_idle(history.id)
        if history.running:
            history.finished = max(history.finished, *history.running)
            history.running = ()
            self.reasoning -= 1

    # --- turns -------------------------------------------------------------------------------

    def turn_starts(self, history: History, usage: TenantUsage, turn_id: int) -> None:
        """A turn of a history runs.

        Args:
            usage: its tenant's.
        """
        usage.turns += 1
        self.tools.forget(history.id)
        if not history.running:
            self.reasoning += 1
            self._activity.not_idle(history.id)
        history.running += (turn_id,)

    def turn_ends(self, history: History, turn_id: int, now_s: float) -> None:
        """A turn of a history runs no more, if it did."""
        running = history.running
        if turn_id in running:
            at = running.index(turn_id)
            # Its own number is kept, not the caller's equal one, as with the id.
            turn_id = running[at]
            self.usage.of(history.id).turns -= 1
            history.running = running[:at] + running[at + 1 :]
            if not history.running:
                self.reasoning -= 1
                self._activity.idle(history.id, now_s)
        history.finished = max(history.finished, turn_id)

    def active(self, now_s: float) -> int:
        """See `ConversationTable.active`."""
        return self.reasoning + self._activity.acting(now_s)

    def _charge(self, history: History, tokens: int) -> None:
        assert history.decoder_id is not None
        self._decoders[history.decoder_id].held_tokens += tokens
        self.usage.of(history.id).held_tokens += tokens
