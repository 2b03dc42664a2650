"""Reads files again when they change, in a process that goes on."""

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

logger = logging.getLogger("ray.serve")

# Files are looked at no more often.
LOOK_S = 1.0
_T = TypeVar("_T")


class Followed(Generic[_T]):
    """The content of files. Where they are not usable any more, what they said last stays good.

    Args:
        read: reads them; raises ValueError or OSError, now too, if they are not usable.
    """

    def __init__(self, paths: Sequence[Path], read: Callable[[], _T], now_s: float) -> None:
        self._paths, self._read = paths, read
        self._looked_s = now_s
        # Before they are read, so that a change in between is noticed.
        self._seen = [*map(_seen, paths)]
        self._says = read()

    def says(self, now_s: float) -> _T:
        """Return what the files say, or said within the last second."""
        if now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            # A fault is logged once, until they change again.
            if (found := [*map(_seen, self._paths)]) != self._seen:
                self._seen = found
                self._follow()
        return self._says

    def _follow(self) -> None:
        try:
            self._says = self._read()
        except (ValueError, OSError) as error:
            logger.error("%s; what was read before stays good", error)
        else:
            logger.info("%s: read again, since it has changed", self._paths[0])


def _seen(path: Path) -> tuple[int, int, int] | None:
    """Return what tells a file from another that is put in its place; None: there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
