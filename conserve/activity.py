"""How many histories are at work: a turn of theirs runs, or did a moment ago."""

from collections import OrderedDict

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
