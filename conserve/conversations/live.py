"""The live histories: by id, by conversation, and by which turns continue them."""

from collections.abc import Callable
from itertools import islice

from conserve import identity
from conserve.histories.groups import Groups
from conserve.histories.kinship import Kinship
from conserve.histories.points import mark
from conserve.history import History
from conserve.recognition import Chain

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
