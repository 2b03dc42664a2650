"""Beginnings of histories: at which others may leave them, and whose KV is counted once."""

import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, Protocol, TypeVar

import msgspec

from conserve.recognition import Digest

MOST_POINTS = 12

# The newest points are kept, whatever lies between them.
_NEWEST = 4

_MARK_BYTES = 8
_POINT = struct.Struct(f"<{_MARK_BYTES}sI")
_LENGTH = struct.Struct("<I")


def mark(digest: Digest) -> bytes:
    """Return the part of a digest that points keep, enough to tell apart those of one root."""
    return digest[:_MARK_BYTES]


def one_point(digest: Digest, tokens: int) -> bytes:
    return _POINT.pack(digest, tokens)


def with_point(packed: bytes, digest: Digest, tokens: int, before: int = 0) -> bytes:
    """Add a newest point to packed ones after ``before`` other bytes.

    Points that are not shorter are dropped: a template may drop the reasoning of earlier answers,
    and of several choices the client may continue a shorter one.
    """
    end = len(packed)
    while end > before and _LENGTH.unpack_from(packed, end - _LENGTH.size)[0] >= tokens:
        end -= _POINT.size
    packed = packed[:end] + _POINT.pack(digest, tokens)
    if len(packed) - before <= MOST_POINTS * _POINT.size:
        return packed
    lengths = [tokens for _, tokens in _POINT.iter_unpack(packed[before:])]

    def loss(i: int) -> float:
        return float(lengths[i + 1] / max(lengths[i - 1], 1))

    drop = before + min(range(1, len(lengths) - _NEWEST), key=loss) * _POINT.size
    return packed[:drop] + packed[drop + _POINT.size :]


def newest_mark(packed: bytes, before: int = 0) -> bytes:
    end = len(packed) - _POINT.size
    return packed[end : end + _MARK_BYTES] if end >= before else b""


class Points:
    """A history's points, shortest first.

    A point is a digest's `mark` and a length. The first and the newest points are kept, since most
    that go back go back a little; those between in about equal ratios. A turn that goes back to a
    dropped point counts from the next shorter one.
    """

    __slots__ = ("packed",)

    def __init__(self, packed: bytes = b"") -> None:
        self.packed = packed

    def __iter__(self) -> Iterator[tuple[bytes, int]]:
        yield from _POINT.iter_unpack(self.packed)

    def __len__(self) -> int:
        return len(self.packed) // _POINT.size

    def add(self, digest: Digest, tokens: int) -> None:
        self.packed = with_point(self.packed, digest, tokens)

    def clip(self, tokens: int) -> None:
        """Note how many tokens of the newest point the next turn kept."""
        if not self.packed:
            return
        *older, (newest, length) = self
        shortest = older[-1][1] if older else 0
        if tokens < length:
            end = len(self.packed) - _POINT.size
            self.packed = self.packed[:end] + _POINT.pack(newest, max(tokens, shortest))

    def __contains__(self, digest: Digest) -> bool:
        return self._find(digest) is not None

    def longest(self, digests: Iterable[Digest]) -> int:
        """Return the tokens of the first of these, given longest first, that is a point, or 0."""
        for digest in digests:
            at = self._find(digest)
            if at is not None:
                tokens: int = _POINT.unpack_from(self.packed, at)[1]
                return tokens
        return 0

    def common(self, others: "Points") -> int:
        """Return the tokens of the longest point that others have too, or 0."""
        known = dict(_POINT.iter_unpack(others.packed))
        return max((min(tokens, known[one]) for one, tokens in self if one in known), default=0)

    def _find(self, digest: Digest) -> int | None:
        sought = mark(digest)
        at = self.packed.find(sought)
        while at >= 0 and at % _POINT.size:
            at = self.packed.find(sought, at + 1)
        return at if at >= 0 else None


class Prefix(msgspec.Struct, gc=False):
    """A beginning that several histories on one decoder have, or had.

    It counts the tokens beyond its ``base``. Users are histories and longer prefixes; it does not
    know them, so there are no cycles for a garbage collector to find. A system part has a ``key``,
    the digest of its ``tools``, and is ``away`` until its decoder has it, or computes it.
    """

    tokens: int
    users: int
    base: "Prefix | None" = None
    key: tuple[str, Digest] | None = None
    away: bool = False
    tools: Digest = b""


class Holder(Protocol):
    """A history on a decoder, or with nothing held."""

    home: str | None
    held_tokens: int
    base: Prefix | None


Held = TypeVar("Held", bound=Holder)


class Sharing(Generic[Held]):
    """Keeps what histories hold, and charges what they share once.

    A decoder holds the tokens of distinct chains, as far as points are known. Every operation is
    O(1) in the number of histories.
    """

    def __init__(self, charge: Callable[[Held, int], None]) -> None:
        self._charge = charge
        self._systems: dict[tuple[str, Digest], Prefix] = {}

    def hold(self, history: Held, tokens: int) -> None:
        while history.base is not None and history.base.tokens > tokens:
            self._rebase(history, history.base.base)
        if tokens != history.held_tokens:
            self._charge(history, tokens - history.held_tokens)
            history.held_tokens = tokens

    def share(self, history: Held, other: Held, tokens: int) -> None:
        """Share the first ``tokens`` of two histories, the most that the first shares with any."""
        tokens = min(tokens, history.held_tokens, other.held_tokens)
        if tokens > _length(history.base):
            prefix = self._prefix(other, tokens)
            # The other, and all that share its beginning, begin with what the first begins with.
            known = history.base
            if _length(known) > _length(prefix.base):
                self._rebase(history, known, prefix)
            self._rebase(history, prefix)

    def share_system(
        self, history: Held, digest: Digest, tokens: int, away: bool = False, tools: Digest = b""
    ) -> None:
        tokens = min(tokens, history.held_tokens)
        if history.home is None or tokens <= _length(history.base):
            return
        key = (history.home, digest)
        system = self._systems.get(key)
        if system is not None and system.tokens > tokens:
            return  # It was counted as longer, so nothing is known to be shared.
        if system is None:
            # `_rebase` takes off what the history holds itself by as much.
            system = self._systems[key] = Prefix(tokens, 0, None, key, away, tools)
            self._charge(history, tokens)
        system.away &= away
        self._rebase(history, system)

    def system(self, decoder_id: str, digest: Digest) -> Prefix | None:
        """Return a system part, if the decoder holds it."""
        return self._systems.get((decoder_id, digest))

    def _rebase(self, history: Held, base: Prefix | None, prefix: Prefix | None = None) -> None:
        """Have a history, or a prefix on its decoder, begin with another prefix."""
        longer = history if prefix is None else prefix
        old, longer.base = longer.base, base
        if base is not None:
            base.users += 1
        if change := _length(old) - _length(base):
            self._charge(history, change)
        while old is not None:
            old.users -= 1
            if old.users:
                return
            self._charge(history, _length(old.base) - old.tokens)
            if old.key is not None:
                del self._systems[old.key]
            old = old.base

    def _prefix(self, other: Held, tokens: int) -> Prefix:
        """Return the prefix of ``other`` that ends at ``tokens``, splitting one if necessary."""
        longer: Held | Prefix = other
        while True:
            base = longer.base
            while base is not None and base.users == 1 and base.key is None:
                # Its other users have gone, so it is a part of the one that is left.
                base = longer.base = base.base
            if base is None or base.tokens < tokens:
                # Counted already, as a part of the longer one.
                longer.base = Prefix(tokens, 1, base)
                return longer.base
            if base.tokens == tokens:
                return base
            longer = base


def held_alone(history: Holder) -> int:
    """Return the tokens that come free if a history goes."""
    held, prefix = history.held_tokens - _length(history.base), history.base
    while prefix is not None and prefix.users == 1:
        held += prefix.tokens - _length(prefix.base)
        prefix = prefix.base
    return held


class Going:
    """Counts the tokens that come free as histories go; a beginning goes with its last user."""

    def __init__(self) -> None:
        self.tokens = 0
        self._gone: dict[int, int] = {}

    def add(self, history: Holder) -> None:
        self.tokens += history.held_tokens - _length(history.base)
        prefix = history.base
        while prefix is not None:
            gone = self._gone[id(prefix)] = self._gone.get(id(prefix), 0) + 1
            if gone < prefix.users:
                return
            self.tokens += prefix.tokens - _length(prefix.base)
            prefix = prefix.base

    def remove(self, history: Holder) -> None:
        self.tokens -= history.held_tokens - _length(history.base)
        prefix = history.base
        while prefix is not None:
            went = self._gone[id(prefix)] == prefix.users
            self._gone[id(prefix)] -= 1
            if not went:
                return
            self.tokens -= prefix.tokens - _length(prefix.base)
            prefix = prefix.base


def held_together(histories: Iterable[Holder]) -> int:
    """Return what histories hold in tokens, with what they share counted once."""
    held, counted = 0, set()
    for history in histories:
        held += history.held_tokens - _length(history.base)
        prefix = history.base
        while prefix is not None and id(prefix) not in counted:
            counted.add(id(prefix))
            held += prefix.tokens - _length(prefix.base)
            prefix = prefix.base
    return held


def _length(prefix: Prefix | None) -> int:
    return 0 if prefix is None else prefix.tokens
