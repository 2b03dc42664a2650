"""Numbers of turns: the table's, and between two of those a decoder's own."""

STRIDE = 256
"""The table numbers turns by multiples of this; numbers between them are the decoder's."""


def first_asked(above: int) -> int:
    """Return the table's first number that is not below this one."""
    return -(-above // STRIDE) * STRIDE


def next_direct(last: int) -> int | None:
    """Return a decoder's next number for a history's turn; None if they are used up.

    A history gets a number of the table's whenever it comes to a decoder, so numbers are unique.
    """
    return last + 1 if (last + 1) % STRIDE else None


def is_direct(turn_id: int) -> bool:
    """Return whether a decoder has given this number."""
    return turn_id % STRIDE != 0
