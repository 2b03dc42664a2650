"""Points of a history: beginnings of known length in tokens, packed into few bytes."""

import struct
from collections.abc import Iterable, Iterator

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
