"""Which histories a conversation has, where it has more than the one that bears its id."""

from collections.abc import Container

from conserve import identity


class Groups:
    """Ids of live histories, by the conversation's. Most have one, and take no room here."""

    def __init__(self) -> None:
        self._further: dict[str, dict[str, None]] = {}

    def add(self, history_id: str, live: Container[str]) -> bool:
        """A history lives from now on.

        Args:
            live: holds the id of every other history that lives.

        Returns:
            Whether it is the first of its conversation.
        """
        if not identity.is_further(history_id):
            return history_id not in self._further
        conversation_id = identity.conversation_of(history_id)
        first = not self.lives(conversation_id, live)
        self._further.setdefault(conversation_id, {})[history_id] = None
        return first

    def discard(self, history_id: str, live: Container[str]) -> bool:
        """A history does not live any more.

        Args:
            live: as for `add`.

        Returns:
            Whether it was the last of its conversation.
        """
        if not identity.is_further(history_id):
            return history_id not in self._further
        conversation_id = identity.conversation_of(history_id)
        further = self._further.get(conversation_id)
        if further is not None:
            further.pop(history_id, None)
            if not further:
                del self._further[conversation_id]
        return not self.lives(conversation_id, live)

    def lives(self, history_id: str, live: Container[str]) -> bool:
        """Whether any history of its conversation lives.

        Args:
            live: holds the id of every history that lives.
        """
        conversation_id = identity.conversation_of(history_id)
        return conversation_id in live or conversation_id in self._further

    def of(self, conversation_id: str, live: Container[str]) -> list[str]:
        """The ids of a conversation's histories, the oldest first.

        Args:
            live: holds the id of every history that lives.
        """
        first = [conversation_id] if conversation_id in live else []
        return first + list(self._further.get(conversation_id, ()))

    def has_further(self, conversation_id: str) -> bool:
        """Whether a conversation has histories that do not bear its id."""
        return conversation_id in self._further

    def beyond_one(self, live: Container[str]) -> int:
        """How many histories there are beyond one a conversation."""
        return sum(
            len(further) - (conversation_id not in live)
            for conversation_id, further in self._further.items()
        )
