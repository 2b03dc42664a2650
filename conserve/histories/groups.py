"""Which histories a conversation has, where it has more than the one that bears its id."""

from collections.abc import Container

from conserve import identity


class Groups:
    """Ids of live histories, by the conversation's. Most have one, and take no room here."""

    def __init__(self) -> None:
        self._further: dict[str, dict[str, None]] = {}

    def add(self, history_id: str) -> None:
        """A history lives from now on."""
        conversation_id = identity.conversation_of(history_id)
        if conversation_id != history_id:
            self._further.setdefault(conversation_id, {})[history_id] = None

    def discard(self, history_id: str) -> None:
        """It does not any more."""
        conversation_id = identity.conversation_of(history_id)
        further = self._further.get(conversation_id)
        if further is not None:
            further.pop(history_id, None)
            if not further:
                del self._further[conversation_id]

    def of(self, conversation_id: str, live: Container[str]) -> list[str]:
        """The ids of a conversation's histories, the oldest first.

        Args:
            live: holds the id of every history that lives.
        """
        first = [conversation_id] if conversation_id in live else []
        return first + list(self._further.get(conversation_id, ()))

    @property
    def further(self) -> int:
        """How many histories are not the first of their conversation."""
        return sum(map(len, self._further.values()))
