"""Finds live histories by their first prompts: what a turn continues or leaves, and kin's KV.

A *family* is the histories of one root. Most have one member, and take one entry here.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from conserve import identity
from conserve.hints import Hints
from conserve.histories.prefixes import MOST_POINTS, Points, Prefix, Sharing, mark, one_point
from conserve.history import History
from conserve.placement import NOTHING_SHARED, Decoder, Shared
from conserve.recognition import Chain, Digest, TailIndex
from conserve.turn import Broken, TurnStats


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
        return self._change(history, lambda: history.set_tails(tails, stats))

    def set_points(self, history: History, points: bytes) -> None:
        self._change(history, lambda: setattr(history, "points", points))

    def _change(self, history: History, change: Callable[[], None]) -> bool:
        family = self._of.get(history.root) if history.root is not None else None
        if not isinstance(family, _Family):
            change()
            return False
        family.tails.discard(history.id, _keys(history))
        change()
        family.tails.add(history.id, _keys(history))
        return True

    def match(self, chain: Chain, conversation_id: str | None) -> str | None:
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
        if history.running or {*history.tails}.isdisjoint(map(mark, ends)):
            return None
        return known if scope_of(history) == scope else None

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


# Only this many histories with one root are looked at, the newest.
_LOOKED_AT = 32
# At most this many system parts in host memory are known.
_MOST_LENDERS = 4096
# Shorter system parts are not worth an account of their own.
LEAST_SYSTEM_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Opening:
    """The prompt with which a history begins; ``chain`` is None for completions.

    ``encode_tokens`` are embeddings of its images that are not encoded yet, and ``adapter`` is its
    adapter's id.
    """

    chain: Chain | None = None
    system_tokens: int = 0
    hints: Hints | None = None
    encode_tokens: int = 0
    adapter: str = ""

    @property
    def root(self) -> Digest | None:
        return None if self.chain is None else self.chain.root

    @property
    def background(self) -> bool:
        return self.hints is not None and self.hints.background

    @property
    def follows_answers(self) -> bool:
        return self.chain is not None and bool(self.chain.ends)

    @property
    def system(self) -> Digest | None:
        """Return the digest of its system part, if that is long enough to count by itself."""
        if self.system_tokens < LEAST_SYSTEM_TOKENS or self.chain is None:
            return None
        return self.chain.system


class Kinship:
    """Finds a history's kin, by its root, and links it to the nearest of them on its decoder."""

    def __init__(
        self, get: Callable[[str], History | None], charge: Callable[[History, int], None]
    ) -> None:
        self._get = get
        self.families = Families(get)
        self.sharing: Sharing[History] = Sharing(charge)
        # Histories that wait for their beginning, which is computed elsewhere.
        self._waiting: set[str] = set()
        # The history that left a system part in host memory.
        self._lenders: dict[Digest, str] = {}

    def has_any(self, opening: Opening) -> bool:
        """Return whether a prompt may have kin; most have none."""
        chain = opening.chain
        known = chain is not None and self.families.knows(chain.root)
        return known or opening.system is not None

    def shared(
        self,
        opening: Opening,
        decoders: Iterable[Decoder],
        history_id: str = "",
        siblings: Callable[[str], Sequence[History]] = lambda _: (),
    ) -> Shared:
        """Return how much of a prompt, which begins a history, each decoder holds already."""
        if opening.chain is None:
            return NOTHING_SHARED
        tokens: dict[str, int] = {}
        there: dict[str, int] = {}
        # What is promised is not computed yet, so it makes no prompt warm.
        computed: dict[str, int] = {}
        promised: dict[str, int] = {}
        conversation_id = identity.conversation_of(history_id)
        for kin in self._kin(opening.chain.root):
            if kin.home is None or not any(one.id == kin.home for one in decoders):
                continue
            common = _common(kin, opening.chain)
            tokens[kin.home] = max(tokens.get(kin.home, 0), common)
            if not self._is_away(kin):
                there[kin.home] = max(there.get(kin.home, 0), common)
            # Other conversations that begin with an equal prompt are spread over decoders.
            if opening.chain.ends or identity.conversation_of(kin.id) == conversation_id:
                known = promised if kin.promised else computed
                known[kin.home] = max(known.get(kin.home, 0), common)
        warm_on = max(computed, key=computed.__getitem__, default=None)
        coming_to = max(promised, key=promised.__getitem__, default=None)
        system = opening.system
        if system is not None:
            for decoder in decoders:
                held = self.sharing.system(decoder.id, system)
                # If it was counted as longer, it is not shared; see `Sharing.share_system`.
                if held is None or held.tokens > opening.system_tokens:
                    continue
                tokens[decoder.id] = max(tokens.get(decoder.id, 0), held.tokens)
                if not held.away:
                    there[decoder.id] = max(there.get(decoder.id, 0), held.tokens)
            if warm_on is None:
                at_home = (
                    one.home
                    for one in reversed(siblings(history_id))
                    if one.home in tokens and not one.promised and _system_of(one) == system
                )
                warm_on = next(at_home, None)
        away = tuple(id for id, most in tokens.items() if there.get(id, 0) < most)
        return Shared(tokens, warm_on, coming_to, away=away) if tokens else NOTHING_SHARED

    def _is_away(self, history: History) -> bool:
        return history.prefiller_id is not None or history.id in self._waiting

    def has_come(self, history: History) -> None:
        """Note that a history's beginning is on its decoder, or about to be."""
        self._waiting.discard(history.id)
        if (system := _system_part(history)) is not None:
            system.away = False

    def lends(self, history: History) -> None:
        """Note that a history leaves its prompt in host memory, from where others may take it."""
        if (system := _system_of(history)) is not None:
            self._lenders.pop(system, None)
            self._lenders[system] = history.id
            if len(self._lenders) > _MOST_LENDERS:
                del self._lenders[next(iter(self._lenders))]

    def lenders(self, opening: Opening, of: str) -> Iterator[tuple[History, int]]:
        """Yield other histories that begin as a prompt of a history does, and for how long."""
        if (chain := opening.chain) is None:
            return
        for kin in self._kin(chain.root):
            if kin.id != of:
                yield kin, Points(kin.points).longest((*chain.ends, chain.root))
        lender = self._get(self._lenders.get(opening.system or b"", ""))
        if lender is not None and lender.id != of:
            yield lender, opening.system_tokens

    def broken(
        self, history_id: str, opening: Opening, siblings: Callable[[str], Sequence[History]]
    ) -> Broken | None:
        """Return where a new history leaves its conversation's others; None if it does not.

        A history that begins without an answer leaves none: it is a sub-agent, say. One that has
        all answers of another goes on beside it.
        """
        if (chain := opening.chain) is None or not opening.follows_answers:
            return None
        others = siblings(history_id)[-_LOOKED_AT:]
        if not others:
            return None
        alike = [one for one in others if one.root == chain.root]
        if alike:
            found = [(_messages_in_common(Points(one.points), chain), one) for one in alike]
            messages, nearest = max(found, key=lambda one: one[0])
            if messages == max(chain.numbers, default=0):
                return None
            exact = len(Points(nearest.points)) < MOST_POINTS
            return Broken("messages", messages, exact)
        # Only a long system part, of a history that is bound, is known. Those that are paused may
        # have this one, but it is another that the client went on with lately.
        parts = [_system_part(one) for one in others if one.home is not None]
        known = {one.key[1]: one.tools for one in parts if one is not None and one.key is not None}
        if not known or None in parts or chain.system in known:
            return Broken("first_prompt")
        return Broken("system" if chain.tools in known.values() else "tools")

    def opened(self, history: History, opening: Opening, waits: bool = False) -> None:
        """Charge a history that was bound with what it will hold, and share that from now on.

        ``waits``: its turn waits for its beginning, until it `has_come`.
        """
        (self._waiting.add if waits else self._waiting.discard)(history.id)
        chain = opening.chain
        if chain is None:
            return
        if self.families.is_alone(chain.root):
            if chain.ends_with_root and not history.points:
                history.points = one_point(chain.root, history.held_tokens)
        else:
            nearest, tokens = self._nearest(history, chain.root, lambda kin: _common(kin, chain))
            points = self._learnt(history, chain)
            if not points and chain.ends_with_root:
                points = one_point(chain.root, history.held_tokens)
            self.families.set_points(history, points)
            if nearest is not None:
                self.sharing.share(history, nearest, tokens)
                self._give_way(nearest, history, tokens)
        if opening.system is not None:
            away, tools = self._is_away(history), chain.tools
            self.sharing.share_system(history, opening.system, opening.system_tokens, away, tools)

    def advanced(self, history: History) -> None:
        """Share what a history has in common, which has a new point or a new decoder."""
        if history.root is None or self.families.is_alone(history.root):
            return
        points = Points(history.points)
        nearest, tokens = self._nearest(
            history,
            history.root,
            lambda kin: min(points.common(Points(kin.points)), kin.held_tokens),
        )
        if nearest is not None:
            self.sharing.share(history, nearest, tokens)
            self._give_way(nearest, history, tokens)
            self._give_way(history, nearest, tokens)

    def evicted(self, history: History) -> list[History]:
        """Return idle histories that began with what the engine has lost, and now hold nothing."""
        lost = [
            kin
            for kin in self._kin(history.root, history)
            if not kin.running and kin.base is history.base is not None
        ]
        for kin in lost:
            self.sharing.hold(kin, 0)
        return lost

    def _give_way(self, cut: History, other: History, tokens: int) -> None:
        """Forget a turn that was cut, and whose client goes on with the other history."""
        if cut.running or cut.held_tokens <= tokens:
            return
        if not other.running and other.held_tokens <= tokens:
            return
        if identity.conversation_of(cut.id) != identity.conversation_of(other.id):
            return
        newest = cut.tails[:1]
        if newest and dict(Points(cut.points))[newest[0]] == tokens:
            self.sharing.hold(cut, tokens)

    def _learnt(self, history: History, chain: Chain) -> bytes:
        """Return a history's points, with those that its kin know of its prompt."""
        beginnings = {mark(digest) for digest in (*chain.ends, chain.root)}
        lengths = dict(Points(history.points))
        for kin in self._kin(chain.root, history):
            if kin.home == history.home:
                for known, tokens in Points(kin.points):
                    if known in beginnings:
                        lengths.setdefault(known, tokens)
        points = Points()
        # Of equally long ones its own comes last, since the newest is the one to continue.
        newest = history.tails[:1]
        for known, tokens in sorted(lengths.items(), key=lambda one: (one[1], one[0] in newest)):
            points.add(known, tokens)
        return points.packed

    def _nearest(
        self, history: History, root: Digest, common: Callable[[History], int]
    ) -> tuple[History | None, int]:
        """Return the history on its decoder with which it has most in common, and how much."""
        nearest, most = None, 0
        for kin in self._kin(root, history):
            if kin.home == history.home:
                tokens = common(kin)
                if tokens > most:
                    nearest, most = kin, tokens
        return nearest, most

    def _kin(self, root: Digest | None, of: History | None = None) -> Iterator[History]:
        if root is None:
            return
        others = (id_ for id_ in self.families.newest(root) if of is None or id_ != of.id)
        for id_ in islice(others, _LOOKED_AT):
            kin = self._get(id_)
            if kin is not None:
                yield kin


def _common(kin: History, chain: Chain) -> int:
    return min(Points(kin.points).longest((*chain.ends, chain.root)), kin.held_tokens)


def _messages_in_common(points: Points, chain: Chain) -> int:
    """Return the number of a chain's last answer that a history has; it may have forgotten one."""
    longest_first = zip(chain.ends, chain.numbers, strict=False)
    return next((number for end, number in longest_first if end in points), 0)


def _system_part(history: History) -> Prefix | None:
    """Return a history's system part; None: it is short, or not bound."""
    prefix = history.base
    while prefix is not None and prefix.base is not None:
        prefix = prefix.base
    if prefix is None or prefix.key is None or prefix.key[0] != history.home:
        return None
    return prefix


def _system_of(history: History) -> Digest | None:
    system = _system_part(history)
    return None if system is None or system.key is None else system.key[1]
