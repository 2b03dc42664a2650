"""Keeps on disk what was done about environments, as JSON lines, for a later process."""

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Entry = dict[str, Any]

# A journal that has grown by this many lines should be rewritten.
_MOST_LINES = 4096


class JournalError(RuntimeError):
    """The journal is damaged; the message says where, and what to do."""


class Journal:
    """An append-only file; an entry is on disk when `add` returns.

    If its process dies, an entry that was being written counts whole or not at all. Only one
    process may write. JournalError if the file is no journal.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.found, whole_bytes = _read(path)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._file, whole_bytes)
        self._length = os.lseek(self._file, 0, os.SEEK_END)
        self._lines = len(self.found)
        _sync_folder(path.parent)

    @property
    def is_long(self) -> bool:
        return self._lines >= _MOST_LINES

    def add(self, entry: Entry) -> None:
        """Write an entry, or raise OSError and leave the file as it was."""
        line = _line(entry)
        try:
            written = os.write(self._file, line)
            if written != len(line):
                raise OSError(f"{self._path}: the disk is full")
            os.fdatasync(self._file)
        except OSError:
            # The next entry must not follow half of this one.
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._length)
                os.lseek(self._file, self._length, os.SEEK_SET)
            raise
        self._length += len(line)
        self._lines += 1

    def rewrite(self, entries: Iterable[Entry]) -> None:
        """Replace all entries in one step, or raise OSError and leave the file as it was."""
        lines = [_line(entry) for entry in entries]
        fresh = self._path.with_suffix(".new")
        file = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(os.dup(file), "wb") as writer:
                writer.writelines(lines)
            os.fsync(file)
            fresh.replace(self._path)
        except OSError:
            os.close(file)
            raise
        os.close(self._file)
        self._file, self._lines, self._length = file, 0, sum(map(len, lines))
        _sync_folder(self._path.parent)

    def close(self) -> None:
        os.close(self._file)


def _line(entry: Entry) -> bytes:
    return json.dumps(entry, separators=(",", ":")).encode() + b"\n"


def _read(path: Path) -> tuple[list[Entry], int]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return [], 0
    # A part of a line was being written when the process died.
    whole, end, _ = data.rpartition(b"\n")
    found: list[Entry] = []
    for number, line in enumerate(whole.split(b"\n") if end else [], 1):
        try:
            entry = json.loads(line)
        except ValueError:
            entry = None
        if not isinstance(entry, dict):
            raise JournalError(
                f"{path}, line {number}: this is no entry of a journal. Remove the folder "
                f"{path.parent}, with the environments' files in it, and start again"
            )
        found.append(entry)
    return found, len(whole) + len(end)


def _sync_folder(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
