"""Follows which conversations began which others, as their clients say."""

from collections.abc import Callable, Collection, Sequence
from itertools import islice

from conserve import identity
from conserve.history import History

# Of a conversation that began more, the oldest are looked at.
_LOOKED_AT = 64


class Parents:
    """Parents and children of live conversations. A parent need not be known, or live.

    Args:
        histories: returns a conversation's live histories.
    """

    def __init__(self, histories: Callable[[str], Sequence[History]]) -> None:
        self._histories = histories
        self._parents: dict[str, str] = {}
        self._children: dict[str, dict[str, None]] = {}

    def __len__(self) -> int:
        return len(self._parents)

    def note(self, history: History) -> None:
        """Note which conversation began this history's, if its client says so; the first stands."""
        parent = None if history.hints is None else history.hints.parent
        own = identity.conversation_of(history.id)
        if parent is not None and parent != own and own not in self._parents:
            self._parents[own] = parent
            self._children.setdefault(parent, {})[own] = None

    def remove(self, conversation_id: str) -> None:
        parent = self._parents.pop(conversation_id, None)
        if parent is not None:
            children = self._children[parent]
            del children[conversation_id]
            if not children:
                del self._children[parent]

    def parent(self, conversation_id: str) -> str | None:
        return self._parents.get(conversation_id)

    def children(self, conversation_id: str) -> Collection[str]:
        """Return the live conversations that this one began, the oldest first."""
        return self._children.get(conversation_id, {}).keys()

    def waits(self, history: History) -> bool:
        """Return whether a history is idle, and one that its conversation began is not done."""
        begun = self._children.get(identity.conversation_of(history.id), ())
        return not history.running and any(
            child.running or child.tool is not None
            for conversation_id in islice(begun, _LOOKED_AT)
            for child in self._histories(conversation_id)
        )

    def is_taken_up(self, history: History) -> bool:
        """Return whether a history is done, and the conversation that began it has gone on since.

        It is done if it has answered without a call. Its parent's next turn takes the answer up.
        """
        parent = self._parents.get(identity.conversation_of(history.id))
        if parent is None or history.running or history.tool is not None or not history.turns:
            return False
        return any(one.last_used_s > history.last_used_s for one in self._histories(parent))

    def done(self, history: History) -> History | None:
        """Return the history that waited for this one, which is done, and waits for no other."""
        parent = self._parents.get(identity.conversation_of(history.id))
        if parent is None or history.running or history.tool is not None:
            return None
        newest = max(self._histories(parent), key=lambda one: one.last_used_s, default=None)
        return None if newest is None or newest.running or self.waits(newest) else newest
