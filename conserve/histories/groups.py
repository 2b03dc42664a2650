"""Keeps the histories of conversations that have more than the one that bears their id."""

from collections.abc import Container

from conserve import identity


class Groups:
    """Ids of live histories, by conversation. Most conversations have one, and take no room here.

    ``live`` is a container of the ids of all live histories.
    """

    def __init__(self) -> None:
        self._further: dict[str, dict[str, None]] = {}

    def add(self, history_id: str, live: Container[str]) -> bool:
        """Add a history before it is in ``live``, and return whether it is its conversation's
        first.
        """
        if not identity.is_further(history_id):
            return history_id not in self._further
        conversation_id = identity.conversation_of(history_id)
        first = not self.lives(conversation_id, live)
        self._further.setdefault(conversation_id, {})[history_id] = None
        return first

    def discard(self, history_id: str, live: Container[str]) -> bool:
        """Remove a history after it left ``live``, and return whether it was its conversation's
        last.
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
        """Return whether any history of its conversation lives."""
        conversation_id = identity.conversation_of(history_id)
        return conversation_id in live or conversation_id in self._further

    def of(self, conversation_id: str, live: Container[str]) -> list[str]:
        """Return the ids of a conversation's histories, the oldest first."""
        first = [conversation_id] if conversation_id in live else []
        return first + list(self._further.get(conversation_id, ()))

    def has_further(self, conversation_id: str) -> bool:
        """Return whether a conversation has histories that do not bear its id."""
        return conversation_id in self._further

    def beyond_one(self, live: Container[str]) -> int:
        """Return how many histories there are beyond one a conversation."""
        return sum(
            len(further) - (conversation_id not in live)
            for conversation_id, further in self._further.items()
        )
