"""Points of a history: beginnings whose length in tokens is known, in as few bytes as they take."""

import struct
from collections.abc import Iterable, Iterator

from conserve.recognition import Digest

MOST_POINTS = 8
"""Of one history: a table may have a million of them."""

_MARK_BYTES = 8
_POINT = struct.Struct(f"<{_MARK_BYTES}sI")


def mark(digest: Digest) -> bytes:
    """What points keep of a digest: enough to tell apart those of one root."""
    return digest[:_MARK_BYTES]


def newest_mark(packed: bytes, before: int = 0) -> bytes:
    """The mark of the longest point; empty without any.

    Args:
        packed: `Points.packed`, behind so many other bytes.
    """
    end = len(packed) - _POINT.size
    return packed[end : end + _MARK_BYTES] if end >= before else b""


class Points:
    """A history's points, shortest first; what is packed is all that is kept of them.

    A point is a digest's `mark` and the length of what it stands for. Of a long history the newest
    points stay, and of older ones fewer the older they are, since most that go back go back a
    little; the first stays always. Who goes back to one that is gone is counted as from the next
    shorter one.

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
        """Add the newest point.

        Those that are no shorter are none any more: a template may drop the reasoning of earlier
        answers, and of several choices the client may go on with a shorter one.
        """
        packed = self.packed
        while packed and _POINT.unpack_from(packed, len(packed) - _POINT.size)[1] >= tokens:
            packed = packed[: -_POINT.size]
        packed += _POINT.pack(digest, tokens)
        if len(packed) > self._most * _POINT.size:
            # The two of which least is lost if they become one: beside the first and the newest,
            # the pair whose distance is smallest against its age.
            points = list(_POINT.iter_unpack(packed))
            count = len(points)

            def loss(i: int) -> float:
                age: int = points[-1][1] - points[i][1]
                gap: int = points[i + 1][1] - points[i - 1][1]
                return gap / (age + 1)

            drop = min(range(1, count - 1), key=loss)
            packed = packed[: drop * _POINT.size] + packed[(drop + 1) * _POINT.size :]
        self.packed = packed

    def up_to(self, tokens: int) -> bytes:
        """Those of so many tokens or fewer, packed."""
        return b"".join(_POINT.pack(*point) for point in self if point[1] <= tokens)

    def longest(self, digests: Iterable[Digest]) -> tuple[Digest, int] | None:
        """The first of these digests, given longest first, that is a point; with its tokens."""
        packed = self.packed
        for digest in digests:
            sought = mark(digest)
            at = packed.find(sought)
            while at >= 0 and at % _POINT.size:
                at = packed.find(sought, at + 1)
            if at >= 0:
                return digest, _POINT.unpack_from(packed, at)[1]
        return None

    def common(self, others: "Points") -> int:
        """The tokens of the longest point that is among the others too; 0 without one.

        Where the two know other lengths of it, the smaller.
        """
        known = dict(_POINT.iter_unpack(others.packed))
        return max((min(tokens, known[one]) for one, tokens in self if one in known), default=0)
