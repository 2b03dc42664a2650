"""Finds live histories by their first prompts: the one that a turn continues, or may leave.

A *family* is the histories of one root. Most have one member, and take one entry here.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from conserve import identity
from conserve.histories.points import mark
from conserve.history import History
from conserve.recognition import Chain, Digest, TailIndex
from conserve.turn import TurnStats


class Families:
    """Finds histories by their root, in time that does not grow with their number.

    A turn continues the history whose newest tail is the longest among the turn's ends: the named
    conversation's own, or one without a name, so that no client gets another's by saying the same.
    A history with a running turn is not continued, but left at that point.
    """

    def __init__(self, get: Callable[[str], History | None]) -> None:
        self._get = get
        self._of: dict[Digest, str | _Family] = {}

    def join(self, history: History) -> None:
        if history.root is None:
            return
        known = self._of.setdefault(history.root, history.id)
        if isinstance(known, str):
            if known == history.id:
                return
            only = self._get(known)
            assert only is not None
            known = self._of[history.root] = _Family()
            known.join(only)
        known.join(history)

    def leave(self, history: History) -> None:
        if history.root is None:
            return
        # Most are alone, and then this takes one look-up instead of two.
        known = self._of.pop(history.root, None)
        if isinstance(known, _Family):
            known.leave(history)
            several = len(known.members) > 1
            self._of[history.root] = known if several else next(iter(known.members))

    def set_tails(self, history: History, tails: tuple[Digest, ...], stats: TurnStats) -> bool:
        """Set a history's tails, and return whether its family has others."""
        family = self._of.get(history.root) if history.root is not None else None
        if isinstance(family, _Family):
            family.tails.discard(history.id, _keys(history))
            history.set_tails(tails, stats)
            family.tails.add(history.id, _keys(history))
            return True
        history.set_tails(tails, stats)
        return False

    def set_points(self, history: History, points: bytes) -> None:
        family = self._of.get(history.root) if history.root is not None else None
        if isinstance(family, _Family):
            family.tails.discard(history.id, _keys(history))
            history.points = points
            family.tails.add(history.id, _keys(history))
        else:
            history.points = points

    def match(self, chain: Chain, conversation_id: str | None) -> str | None:
        """Return the history that a turn continues, or None."""
        known = self._of.get(chain.root)
        if known is None:
            return None
        scope = scope_for(conversation_id)
        # A history without an answer yet has the root as its tail.
        ends = (*chain.ends, chain.root) if scope else chain.ends
        if isinstance(known, _Family):
            return known.tails.match((mark(end) + scope for end in ends), self._is_running)
        history = self._get(known)
        assert history is not None
        if history.running:
            return None
        tails = history.tails
        for end in ends:
            if mark(end) in tails:
                return known if scope_of(history) == scope else None
        return None

    def newest(self, root: Digest) -> Iterator[str]:
        """Return the ids of a family's members, the newest first."""
        known = self._of.get(root)
        if isinstance(known, str):
            return iter((known,))
        return iter(()) if known is None else reversed(known.members)

    def before(self, chain: Chain, conversation_id: str | None) -> Iterator[History]:
        """Yield the histories that a turn would continue if its newest answer were theirs."""
        known = self._of.get(chain.root)
        if known is None:
            return
        scope = scope_for(conversation_id)
        marks = [mark(end) for end in (*chain.ends[1:], chain.root)]
        if isinstance(known, str):
            ids: Iterable[str] = (known,)
        else:
            ids = (id for one in marks for id in known.tails.newest(one + scope))
        for history_id in ids:
            history = self._get(history_id)
            assert history is not None
            if scope_of(history) == scope and not set(marks).isdisjoint(history.tails):
                yield history

    def rooted(self, chain: Chain) -> Chain:
        """Return a turn's chain from the first prompt on, if its client leaves answers out."""
        root = next((one for one in chain.prompts if one in self._of), None)
        return chain if root is None else chain.since(root)

    def knows(self, root: Digest) -> bool:
        return root in self._of

    def is_alone(self, root: Digest) -> bool:
        return not isinstance(self._of.get(root), _Family)

    def _is_running(self, history_id: str) -> bool:
        history = self._get(history_id)
        return history is None or history.running != ()


class _Family:
    """A root's histories, the oldest first, and the tails by which they are continued."""

    __slots__ = ("members", "tails")

    def __init__(self) -> None:
        self.members: dict[str, None] = {}
        self.tails = TailIndex()

    def join(self, history: History) -> None:
        self.members[history.id] = None
        self.tails.add(history.id, _keys(history))

    def leave(self, history: History) -> None:
        self.members.pop(history.id, None)
        self.tails.discard(history.id, _keys(history))


def _keys(history: History) -> Sequence[bytes]:
    scope = scope_of(history)
    return [tail + scope for tail in history.tails]


def scope_of(history: History) -> bytes:
    return scope_for(identity.conversation_of(history.id))


def scope_for(conversation_id: str | None) -> bytes:
    """Return the scope of a turn's conversation: empty without a client's name for it."""
    if conversation_id is None or identity.is_generated(conversation_id):
        return b""
    return conversation_id.encode()
