"""Memory in which a node's engines keep what they have encoded, for one another.

It is a ring of records, the oldest of which is overwritten first. The memory has no name in
/dev/shm (see `upstream.unnamed_memory`): one process reserves it, and it goes with the last
process that uses it.
"""

import contextlib
import fcntl
import mmap
import os
import struct
import time
from collections.abc import Iterator
from typing import NamedTuple

# The name of an arena's path in a connector's configuration.
ARENA_PATH = "conserve.arena"
KEY_BYTES = 32
_ALIGNED = 64
# Two counts of bytes since the beginning, skipped ones included: up to where records are whole, and
# up to where the ring may have been overwritten. They differ while a record is written, and after
# its writer was killed; then the next one is written over it.
_WHOLE, _BEGUN = 0, 1
# How often data were offered, and read: how many images were encoded, and how many were found.
_OFFERED, _FOUND = 2, 3
_HEADER_BYTES = _ALIGNED
# A record's bytes in all, those of its data, and its key.
_HEAD = struct.Struct(f"<QQ{KEY_BYTES}s")
_SKIP = bytes(KEY_BYTES)
_LARGEST_SHARE = 0.25
# A record is written in milliseconds; a process that was stopped may hold the lock for longer.
_LONGEST_WAIT_S = 1.0
# After such a wait nothing is looked up or written for this long.
_PAUSE_S = 5.0
_LOOK_S = 0.0002


class ArenaError(RuntimeError):
    """The memory cannot be used; the message says why."""


def make_arena(size: int) -> str:
    """Reserve memory for an arena of ``size`` bytes; returns its path on this machine.

    This process has to live while others open it. Memory is used as records come.
    """
    file = os.memfd_create("conserve-encoded", os.MFD_CLOEXEC)
    os.ftruncate(file, _HEADER_BYTES + max(1, size // _ALIGNED) * _ALIGNED)
    return f"/proc/{os.getpid()}/fd/{file}"


class _Record(NamedTuple):
    at: int
    length: int


class Arena:
    """One process's view of the ring, for one thread.

    Args:
        path: as `make_arena` returns it; raises `ArenaError` if it cannot be opened.
        waits: whether to wait while another process writes; otherwise nothing is found meanwhile.
    """

    def __init__(self, path: str, *, waits: bool = True) -> None:
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            self._map = mmap.mmap(self._file, 0)
        except (OSError, ValueError) as error:
            raise ArenaError(f"{path} cannot be opened: {error}") from None
        # Each is written whole, so that no process sees half of one.
        self._counts = memoryview(self._map)[:_HEADER_BYTES].cast("Q")
        self._room = len(self._map) - _HEADER_BYTES
        self._known: dict[bytes, _Record] = {}
        # Up to where records are known.
        self._read = 0
        self._waits = waits
        self._paused_until_s = 0.0

    def get(self, key: bytes) -> bytes | None:
        """Return a copy of a key's data; None if they are not there."""
        with self._locked() as locked:
            record = self._find(key) if locked else None
            if record is None:
                return None
            self._counts[_FOUND] += 1
            start = self._place(record.at) + _HEAD.size
            return self._map[start : start + record.length]

    def has(self, key: bytes) -> bool:
        """Return whether a key's data are there; this is not counted."""
        with self._locked() as locked:
            return locked and self._find(key) is not None

    def put(self, key: bytes, data: bytes) -> bool:
        """Write data, unless they are there; returns False if they are too large for the ring."""
        size = -(-(_HEAD.size + len(data)) // _ALIGNED) * _ALIGNED
        with self._locked() as locked:
            if not locked:
                return True
            self._counts[_OFFERED] += 1
            if size > _LARGEST_SHARE * self._room:
                return False
            if self._find(key) is not None:
                return True
            at = self._counts[_WHOLE]
            to_end = self._room - at % self._room
            if size > to_end:
                self._write(at, to_end, _SKIP, b"")
                at += to_end
            self._write(at, size, key, data)
        return True

    def counts(self) -> tuple[int, int]:
        """Return how often data were offered, and how often some were read."""
        return self._counts[_OFFERED], self._counts[_FOUND]

    def _write(self, at: int, size: int, key: bytes, data: bytes) -> None:
        # A writer that was killed may have overwritten more.
        self._counts[_BEGUN] = max(at + size, self._counts[_BEGUN])
        start = self._place(at)
        begin = start + _HEAD.size
        self._map[start:begin] = _HEAD.pack(size, len(data), key)
        self._map[begin : begin + len(data)] = data
        self._counts[_WHOLE] = at + size

    def _find(self, key: bytes) -> _Record | None:
        if self._read != self._counts[_WHOLE]:
            self._read_on()
        record = self._known.get(key)
        return record if record is not None and self._left(record) >= 0 else None

    def _read_on(self) -> None:
        """Learn of the records that were written since the last time."""
        whole = self._counts[_WHOLE]
        if self._read < self._counts[_BEGUN] - self._room:
            # One begins where the ring does.
            self._read = whole - whole % self._room
        while self._read < whole:
            start = self._place(self._read)
            size, length, key = _HEAD.unpack(self._map[start : start + _HEAD.size])
            if key != _SKIP:
                self._known[key] = _Record(self._read, length)
            self._read += size
        self._known = {key: one for key, one in self._known.items() if self._left(one) >= 0}

    def _left(self, record: _Record) -> int:
        """Return how many bytes may be written before a record is overwritten."""
        return record.at + self._room - self._counts[_BEGUN]

    def _place(self, at: int) -> int:
        return _HEADER_BYTES + at % self._room

    @contextlib.contextmanager
    def _locked(self) -> Iterator[bool]:
        """Hold the lock under which records are read and written; yields whether it was got.

        The kernel orders memory where it hands the lock over, so a reader sees all that the last
        writer wrote, on ARM as on x86. Of a process that is killed, it frees the lock.
        """
        began_s = time.monotonic()
        got = began_s >= self._paused_until_s and self._lock()
        while not got and self._waits and began_s >= self._paused_until_s:
            if time.monotonic() >= began_s + _LONGEST_WAIT_S:
                self._paused_until_s = time.monotonic() + _PAUSE_S
                break
            time.sleep(_LOOK_S)
            got = self._lock()
        try:
            yield got
        finally:
            if got:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def _lock(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
