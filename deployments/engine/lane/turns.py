"""Decides whose turn it is to run the model: the engine's step, or the lane's chunk.

vLLM keeps the forward pass's context in a variable of its module, so only one thread at a time may
be within the model's Python code. On a GPU that is while kernels are launched: they overlap. On a
CPU it is the computation itself: there steps and chunks alternate.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class LaneEnds(Exception):
    """The engine ends, and its lane with it."""


class Turns:
    """A lock for two threads.

    Args:
        alternate: whether a chunk follows each step, and a step each chunk, for as long as there
            are both. Else whoever comes first.
    """

    def __init__(self, alternate: bool) -> None:
        self._alternate = alternate
        self._changed = threading.Condition()
        self._busy = False
        self._chunk_waits = False
        # Whether a step has passed since the last chunk.
        self._chunk_is_next = False
        self._over = False

    @contextmanager
    def step(self, ends: bool = True) -> Iterator[None]:
        """A step's turn, or (``ends`` False) that of a part of it.

        A chunk whose turn it is goes first.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: not self._busy and not (self._chunk_is_next and self._chunk_waits)
            )
            self._busy = True
        try:
            yield
        finally:
            with self._changed:
                self._busy = False
                self._chunk_is_next = self._alternate and (ends or self._chunk_is_next)
                self._changed.notify_all()

    @contextmanager
    def chunk(self) -> Iterator[None]:
        """A chunk's turn.

        Raises:
            LaneEnds: there is none any more.
        """
        with self._changed:
            self._chunk_waits = True
            self._changed.wait_for(
                lambda: (
                    self._over or (not self._busy and (self._chunk_is_next or not self._alternate))
                )
            )
            self._chunk_waits = self._chunk_is_next = False
            if self._over:
                self._changed.notify_all()
                raise LaneEnds
            self._busy = True
        try:
            yield
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def end(self) -> None:
        """No chunk begins any more."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
