"""Points of a history: beginnings whose length in tokens is known, in as few bytes as they take."""

import struct
from collections.abc import Iterable, Iterator

from conserve.recognition import Digest

MOST_POINTS = 12
"""Of one history: a table may have a million of them."""

# Of these, so many are the newest, whatever lies between them.
_NEWEST = 4

_MARK_BYTES = 8
_POINT = struct.Struct(f"<{_MARK_BYTES}sI")
_LENGTH = struct.Struct("<I")


def mark(digest: Digest) -> bytes:
    """Return what points keep of a digest: enough to tell apart those of one root."""
    return digest[:_MARK_BYTES]


def one_point(digest: Digest, tokens: int) -> bytes:
    """A single point, packed."""
    return _POINT.pack(digest, tokens)


def with_point(
    packed: bytes, digest: Digest, tokens: int, before: int = 0, most: int = MOST_POINTS
) -> bytes:
    """Points and a newest one, packed.

    Those that are no shorter are none any more: a template may drop the reasoning of earlier
    answers, and of several choices the client may go on with a shorter one.

    Args:
        packed: `Points.packed`, behind so many other bytes as ``before`` says; they stay.
        most: how many points are kept.
    """
    end = len(packed)
    while end > before and _LENGTH.unpack_from(packed, end - _LENGTH.size)[0] >= tokens:
        end -= _POINT.size
    packed = packed[:end] + _POINT.pack(digest, tokens)
    if len(packed) - before <= most * _POINT.size:
        return packed
    lengths = [tokens for _, tokens in _POINT.iter_unpack(packed[before:])]

    def loss(i: int) -> float:
        shorter: int = lengths[i - 1]
        longer: int = lengths[i + 1]
        return longer / max(shorter, 1)

    drop = before + min(range(1, len(lengths) - _NEWEST), key=loss) * _POINT.size
    return packed[:drop] + packed[drop + _POINT.size :]


def newest_mark(packed: bytes, before: int = 0) -> bytes:
    """The mark of the longest point; empty without any.

    Args:
        packed: `Points.packed`, behind so many other bytes.
    """
    end = len(packed) - _POINT.size
    return packed[end : end + _MARK_BYTES] if end >= before else b""


class Points:
    """A history's points, shortest first; what is packed is all that is kept of them.

    A point is a digest's `mark` and the length of what it stands for. Of a long history the first
    stays, and the newest, since most that go back go back a little; those between are kept so that
    each is about as much longer than the one before as any. Who goes back to one that is gone is
    counted as from the next shorter one: so of any beginning much the same share is known.

    Args:
        packed: `packed` of others.
        most: how many are kept.
    """

    __slots__ = ("_most", "packed")

    def __init__(self, packed: bytes = b"", most: int = MOST_POINTS) -> None:
        self.packed = packed
        self._most = most

    def __iter__(self) -> Iterator[tuple[bytes, int]]:
        yield from _POINT.iter_unpack(self.packed)

    def __len__(self) -> int:
        return len(self.packed) // _POINT.size

    def add(self, digest: Digest, tokens: int) -> None:
        """Add the newest point; see `with_point`."""
        self.packed = with_point(self.packed, digest, tokens, most=self._most)

    def clip(self, tokens: int) -> None:
        """The newest is no longer than that: so much of it stands in what came after it."""
        if not self.packed:
            return
        *older, (newest, length) = self
        shortest = older[-1][1] if older else 0
        if tokens < length:
            end = len(self.packed) - _POINT.size
            self.packed = self.packed[:end] + _POINT.pack(newest, max(tokens, shortest))

    def longest(self, digests: Iterable[Digest]) -> int:
        """The tokens of the first of these, given longest first, that is a point; 0 without."""
        for digest in digests:
            at = self._find(digest)
            if at is not None:
                tokens: int = _POINT.unpack_from(self.packed, at)[1]
                return tokens
        return 0

    def common(self, others: "Points") -> int:
        """The tokens of the longest point that is among the others too; 0 without one.

        Where the two know other lengths of it, the smaller.
        """
        known = dict(_POINT.iter_unpack(others.packed))
        return max((min(tokens, known[one]) for one, tokens in self if one in known), default=0)

    def _find(self, digest: Digest) -> int | None:
        sought = mark(digest)
        at = self.packed.find(sought)
        while at >= 0 and at % _POINT.size:
            at = self.packed.find(sought, at + 1)
        return at if at >= 0 else None
