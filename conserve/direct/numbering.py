"""Numbers of turns: the table's, and between two of those a decoder's own."""

STRIDE = 256
"""The table numbers turns by multiples of this. A decoder has those up to the next one."""


def first_asked(above: int) -> int:
    """The table's first number that is not below this one.

    Example:
        >>> first_asked(1), first_asked(256), first_asked(257)
        (256, 256, 512)
    """
    return -(-above // STRIDE) * STRIDE


def next_direct(last: int) -> int | None:
    """A decoder's own number for a history's turn after this one; None: they are used up.

    No two decoders give the same one: a history gets a number of the table's whenever it comes to a
    decoder.

    Example:
        >>> next_direct(256), next_direct(510), next_direct(511)
        (257, 511, None)
    """
    return last + 1 if (last + 1) % STRIDE else None


def is_direct(turn_id: int) -> bool:
    """Whether a decoder has given this number."""
    return turn_id % STRIDE != 0
